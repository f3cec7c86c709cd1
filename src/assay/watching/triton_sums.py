"""`sums` in one kernel: a program reads some elements of one head, once, and leaves out what is not finite."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.formats.spec import Format

_BLOCK, _BLOCKS = 256, 16
"""Elements that a program takes at a time, and how often."""
_ADDED, _LARGEST = 17, 5


@triton.jit  # type: ignore[untyped-decorator]
def _of_two(x: tl.tensor, y: tl.tensor, sums: tl.tuple) -> tl.tuple:
    """The two with 0 where one is not finite; of the differences sum, how often just one is finite, squares, top."""
    finite = (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf"))
    same = (x == y) | ((x != x) & (y != y))
    x, y = tl.where(finite, x, 0.0), tl.where(finite, y, 0.0)
    d = x - y
    added, wrong, square, largest = sums
    wrong += (~finite & ~same).to(tl.float64)
    return x, y, (added + d, wrong, square + d * d, tl.maximum(largest, tl.abs(d)))


@triton.jit  # type: ignore[untyped-decorator]
def _store(out: tl.tensor, step: tl.tensor, sums: tl.tuple, FIRST: tl.constexpr, TOP: tl.constexpr) -> None:
    """The sums from FIRST on; what is largest, the last, at TOP."""
    for k in tl.static_range(len(sums) - 1):
        tl.store(out + (FIRST + k) * step, tl.sum(sums[k], 0))
    tl.store(out + TOP * step, tl.max(sums[len(sums) - 1], 0))


@triton.jit  # type: ignore[untyped-decorator]
def _load(x: tl.tensor, strides: tl.tuple, batch: tl.tensor, head: tl.tensor, at: tl.tensor, dims: int) -> tl.tensor:
    """Elements of a head in the order of its rows; beyond its `size` all are 0, and add nothing."""
    x += batch * strides[0] + head * strides[1]
    return tl.load(x + (at // dims) * strides[2] + at % dims, mask=at < strides[3], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(
    actual: tl.tensor,
    other: tl.tensor,
    golden: tl.tensor,
    sums: tl.tensor,
    strides_actual: tl.tuple,
    strides_other: tl.tuple,
    strides_golden: tl.tuple,
    dims: int,
    heads: int,
    pieces: int,
    columns: int,
    step: int,
    SMALLEST: tl.constexpr,
    ULPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """sums[name, batch, column, piece], names in the order of `sums.WITH_GOLDEN`; a name's are `step` apart."""
    program = tl.program_id(0).to(tl.int64)
    batch, head, piece = program // pieces // heads, program // pieces % heads, program % pieces
    none = tl.zeros([BLOCK], tl.float64)
    difference, floor, baseline, error = (
        (none, none, none, none),
        (none, none, none, none),
        (none, none, none, none),
        (none, none, none, none),
    )
    distance, steps, of_actual, of_golden, not_finite, most = none, none, none, none, none, none
    for block in range(BLOCKS):
        at = (piece * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        exact = _load(golden, strides_golden, batch, head, at, dims)
        x = _load(actual, strides_actual, batch, head, at, dims).to(tl.float64)
        z = _load(other, strides_other, batch, head, at, dims).to(tl.float64)
        not_finite += (~(tl.abs(x) < float("inf"))).to(tl.float64)
        rounded = exact
        if actual.dtype.element_ty != tl.float64:
            rounded = exact.to(tl.float32).to(actual.dtype.element_ty).to(tl.float64)
        _, _, difference = _of_two(x, z, difference)
        _, _, floor = _of_two(rounded, exact, floor)
        _, _, baseline = _of_two(z, exact, baseline)
        x, y, error = _of_two(x, exact, error)
        # Clearing the sign and the mantissa leaves 2^floor(log2 |y|), as in `assay.metrics.ulps`.
        power = (y.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
        ulps = tl.abs(x - y) / tl.maximum(power, SMALLEST) * ULPS
        distance += tl.abs(x - y)
        steps += ulps
        of_actual += x * x
        of_golden += y * y
        most = tl.maximum(most, ulps)
    out = sums + (batch * columns + head) * pieces + piece
    _store(out, step, difference, 0, 17)
    _store(out, step, floor, 3, 18)
    _store(out, step, baseline, 6, 19)
    _store(out, step, error, 9, 20)
    _store(out, step, (distance, steps, of_actual, of_golden, not_finite, most), 12, 21)


def of_tensors(threes: Sequence[tuple[Tensor, Tensor, Tensor]], format: Format) -> tuple[Tensor, Tensor]:
    """Of tensors (B, heads, rows, D), all of one B: what is added up, and what is largest, (names, heads of all)."""
    heads = [golden.shape[1] for _, _, golden in threes]
    batch, columns = threes[0][2].shape[0], sum(heads)
    pieces = triton.cdiv(max(golden[0, 0].numel() for _, _, golden in threes), _BLOCK * _BLOCKS)
    sums = threes[0][2].new_empty(_ADDED + _LARGEST, batch, columns, pieces)
    # Triton launches on the current device, which need not be theirs. For a CPU tensor this does nothing.
    with torch.cuda.device_of(sums):
        for three, count, first in zip(threes, heads, itertools.accumulate(heads, initial=0), strict=False):
            tensors = [x if x.stride(3) == 1 else x.contiguous() for x in three]
            strides = [(*x.stride()[:3], x[0, 0].numel()) for x in tensors]
            _sums_kernel[(batch * count * pieces,)](
                *tensors, sums[:, :, first:], *strides, tensors[0].shape[3], count, pieces, columns, sums.stride(0),
                format.smallest_normal, 2.0**format.mantissa, _BLOCK, _BLOCKS, enable_fp_fusion=True,
            )  # fmt: skip
    return sums[:_ADDED].sum((1, 3)), sums[_ADDED:].amax((1, 3))
