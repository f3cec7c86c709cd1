"""OCP microscaling (MX): blocks of consecutive values that share a power of two as their scale.

For a block with largest magnitude a, the scale is 2^(floor(log2 a) - e), where e is the exponent of the
element format's largest value; then x/scale is rounded to the element format, saturating. The scale is
stored as E8M0, which holds 2^-127 to 2^127 and NaN. (OCP Microscaling Formats v1.0, section 6.3.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from assay.formats.catalog import get
from assay.formats.dtypes import check_carrier, holds
from assay.formats.modes import Rounding
from assay.formats.rounding import round_to
from assay.formats.spec import Format

_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -127, 127  # of an E8M0 scale


def round_to_mx(
    x: Tensor,
    format: Format | str,
    *,
    block: int = 32,
    dim: int = -1,
    rounding: Rounding = "nearest_even",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Round `x` to MX blocks of `block` values along `dim`, with elements of `format`, and scale back.

    The last block is shorter where the length is no multiple of `block`. A block with a NaN or an infinity
    becomes all NaN, for its scale does. The result has x's dtype if that is float32 or float64 and holds
    the smallest scaled element; otherwise the narrowest of the two that does. It never requires grad.
    """
    format = get(format)
    _check(x, block, dim)
    blocks = _blocks(x, block, dim)
    scales = _scales(blocks, format)
    elements = round_to(blocks / scales, format, rounding, saturate=True, generator=generator)
    length = x.shape[dim]
    values = (elements * scales).flatten(-2)[..., :length].movedim(-1, dim)
    return values.to(_result_dtype(x.dtype, format)).contiguous()


def mx_scales(x: Tensor, format: Format | str, *, block: int = 32, dim: int = -1) -> Tensor:
    """The scales that `round_to_mx` uses: one for each block along `dim`, as float32 (which holds them all).

    A block of zeros has the smallest scale, 2^-127; a block with a NaN or an infinity has NaN.
    """
    format = get(format)
    _check(x, block, dim)
    scales = _scales(_blocks(x, block, dim), format)
    return scales.squeeze(-1).movedim(-1, dim).float().contiguous()


def _blocks(x: Tensor, block: int, dim: int) -> Tensor:
    """`x` with `dim` last and cut into blocks, as float64: there no power of two below loses a bit."""
    rows = x.detach().to(torch.float64).movedim(dim, -1)
    missing = -rows.shape[-1] % block
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))  # zeros change no maximum
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // block, block)


def _scales(blocks: Tensor, format: Format) -> Tensor:
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    floor_log2 = torch.frexp(largest).exponent - 1
    exponent = (floor_log2 - format.max_exponent).clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    exponent = exponent.where(largest > 0, _SMALLEST_EXPONENT)
    powers = ((exponent.long() + 1023) << 52).view(torch.float64)  # exact on every device, as pow need not be
    return powers.where(largest.isfinite(), torch.nan)


def _result_dtype(dtype: torch.dtype, format: Format) -> torch.dtype:
    smallest = format.smallest * 2.0**_SMALLEST_EXPONENT
    if dtype != torch.float64 and smallest >= 2.0**-149 and holds(torch.float32, format):
        return torch.float32
    return torch.float64


def _check(x: Tensor, block: int, dim: int) -> None:
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise ValueError("x must be a tensor with at least one dimension to cut into blocks, got a scalar.")
    check_carrier(x.dtype)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a positive number of values, got {block!r}. OCP uses 32.")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dimension of x, which has {x.dim()}, got {dim}.")
