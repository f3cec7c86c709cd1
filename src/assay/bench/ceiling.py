"""The matmul ceiling: what this machine's own matrix product reaches, in the same minute and the same dtype.

FP16 on a CPU is FP32's.
"""

from __future__ import annotations

import torch

from assay.bench.timing import Work

_SIDE = {"cuda": 8192, "cpu": 2048}


def matmul_of(dtype: torch.dtype, device: torch.device) -> tuple[Work, float]:
    """A product of two large square matrices, and its arithmetic."""
    if device.type == "cpu" and dtype == torch.float16:  # torch's product takes far longer, and kernels go by FP32
        dtype = torch.float32
    side = _SIDE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
    a @ b  # the first one starts the library, which takes longer than the product
    return lambda: a @ b, 2.0 * side**3
