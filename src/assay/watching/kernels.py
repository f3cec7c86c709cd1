"""Whether our Triton kernels can look at a tensor; where they cannot, plain torch finds the same."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def fused(x: Tensor) -> bool:
    """Of 16, 32 or 64 bits, on a GPU, with Triton installed."""
    return x.is_cuda and x.is_floating_point() and x.element_size() > 1 and _triton()


def fused_in_double(x: Tensor) -> bool:
    """Also whether they multiply in FP64 on matrix units, as our kernels are compiled for: on Hopper."""
    return fused(x) and _capability(x.device) == (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _triton() -> bool:
    return find_spec("triton") is not None
