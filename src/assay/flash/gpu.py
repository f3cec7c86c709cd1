"""What a GPU is and has."""

from __future__ import annotations

from functools import cache

import torch


@cache
def processors(index: int) -> int:
    """Its multiprocessors."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def is_hopper(index: int) -> bool:
    """Whether it is NVIDIA's Hopper; AMD's tell the same number."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] == 9
