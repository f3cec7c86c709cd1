"""`sums` in one kernel: a program reads some elements of one head, once, and leaves out what is not finite."""

from __future__ import annotations

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
def _sums_kernel(
    actual: tl.tensor,
    other: tl.tensor,
    golden: tl.tensor,
    sums: tl.tensor,
    size: int,
    pieces: int,
    SMALLEST: tl.constexpr,
    ULPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """sums[name, head, piece], names in the order of `sums.WITH_GOLDEN`."""
    program = tl.program_id(0).to(tl.int64)
    head, piece = program // pieces, program % pieces
    none = tl.zeros([BLOCK], tl.float64)
    difference, floor, baseline, error = (
        (none, none, none, none),
        (none, none, none, none),
        (none, none, none, none),
        (none, none, none, none),
    )
    distance, steps, of_actual, of_golden, not_finite, most = none, none, none, none, none, none
    for block in range(BLOCKS):
        inside = (piece * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        at, mask = head * size + inside, inside < size  # beyond it all are 0, and add nothing
        exact = tl.load(golden + at, mask=mask, other=0.0)
        x = tl.load(actual + at, mask=mask, other=0.0).to(tl.float64)
        z = tl.load(other + at, mask=mask, other=0.0).to(tl.float64)
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
    out, step = sums + program, tl.num_programs(0).to(tl.int64)
    _store(out, step, difference, 0, 17)
    _store(out, step, floor, 3, 18)
    _store(out, step, baseline, 6, 19)
    _store(out, step, error, 9, 20)
    _store(out, step, (distance, steps, of_actual, of_golden, not_finite, most), 12, 21)


def of_tensor(actual: Tensor, other: Tensor, golden: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Of tensors (B, heads, rows, D): what is added up, and what is largest, (names, heads) each."""
    three = (actual.contiguous(), other.contiguous(), golden.contiguous())
    batch, heads = actual.shape[:2]
    size = actual.numel() // (batch * heads)
    pieces, ulps = triton.cdiv(size, _BLOCK * _BLOCKS), 2.0**format.mantissa
    sums = golden.new_empty(_ADDED + _LARGEST, batch, heads, pieces)
    # Triton launches on the current device, which need not be theirs. For a CPU tensor this does nothing.
    with torch.cuda.device_of(golden):
        grid = (batch * heads * pieces,)
        _sums_kernel[grid](*three, sums, size, pieces, format.smallest_normal, ulps, _BLOCK, _BLOCKS)
    return sums[:_ADDED].sum((1, 3)), sums[_ADDED:].amax((1, 3))
