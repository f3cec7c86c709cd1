"""A kernel that calls the device functions on one block, as a user's kernel would in its loop."""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from assay.formats import Format
from assay.formats.triton_functions import device_constants, round_nearest_even_fp32, round_toward_zero_fp32


def round_in_a_kernel(x: torch.Tensor, format: Format, *, cut: bool, saturate: bool) -> torch.Tensor:
    """Round a flat fp32 tensor by `round_toward_zero_fp32` if `cut`, else by `round_nearest_even_fp32`."""
    out = torch.empty_like(x)
    constants = device_constants(format, saturate=saturate)
    _kernel[(1,)](x, out, x.numel(), cut, *constants, BLOCK=triton.next_power_of_2(x.numel()))
    return out


@triton.jit
def _kernel(
    x_pointer: tl.tensor,
    out_pointer: tl.tensor,
    count: tl.tensor,
    CUT: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    FLUSH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_pointer + offsets, mask=offsets < count)
    if CUT:
        rounded = round_toward_zero_fp32(x, MANTISSA, MIN_EXPONENT, MAX, OVERFLOW, FLUSH)
    else:
        rounded = round_nearest_even_fp32(x, MANTISSA, MIN_EXPONENT, MAX, OVERFLOW, FLUSH)
    tl.store(out_pointer + offsets, rounded, mask=offsets < count)
