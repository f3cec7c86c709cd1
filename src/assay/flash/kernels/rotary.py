"""Rotary position embedding: a program reads some rows of one head once, turns their pairs, and writes them once."""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from assay.flash.kernels.tile import place_of

_ELEMENTS = 4096
"""Of one program: enough loads under way at once to hide the memory's latency, few enough to stay in registers."""
_LARGEST_GRID = 65535
"""Heads, and sequences, of one launch: what CUDA takes."""


@triton.jit
def _turn(a: tl.tensor, b: tl.tensor, c: tl.tensor, s: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A pair turned by the angle of cosine c and sine s."""
    return a * c - b * s, a * s + b * c


@triton.jit
def rotate_rows(
    x: tl.tensor,
    x_strides: tl.tuple,
    out: tl.tensor,
    out_strides: tl.tuple,
    cos: tl.tensor,
    cos_strides: tl.tuple,
    sin: tl.tensor,
    sin_strides: tl.tuple,
    offsets: tl.tensor,
    cu: tl.tensor,
    sequences: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Grid: blocks of rows, heads, batch; packed: blocks of rows of all sequences, heads.

    Positions that the tables do not hold give NaN: rather seen than wrong.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first, length = batch, 0, rows
    if cu is not None:
        sequence, block, _ = place_of(cu, sequences, block, ROWS)
        if sequence == sequences:
            return
        first = tl.load(cu + sequence)
        length = tl.load(cu + sequence + 1) - first
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < length
    position = row
    if offsets is not None:
        position += tl.load(offsets + sequence)

    dims = tl.arange(0, BLOCK_HALF)[None, :]
    entry = tl.abs(position).to(tl.int64)
    held = there & (entry < positions) & (dims < HALF)
    c = tl.load(cos + entry * cos_strides[0] + dims * cos_strides[1], mask=held, other=float("nan")).to(WIDE)
    s = tl.load(sin + entry * sin_strides[0] + dims * sin_strides[1], mask=held, other=float("nan")).to(WIDE)
    if INVERSE:
        s = -s
    s = tl.where(position < 0, -s, s)

    x += batch.to(tl.int64) * x_strides[0] + head.to(tl.int64) * x_strides[1]
    out += batch.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    from_row = x + (first + row).to(tl.int64) * x_strides[2]
    to_row = out + (first + row).to(tl.int64) * out_strides[2]
    if INTERLEAVED:
        # Neighbours are loaded side by side and parted in registers: two loads of every other element would each
        # touch all of the memory.
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = there & (both < 2 * HALF)
        pairs = tl.load(from_row + both * x_strides[3], mask=mask).to(WIDE)
        a, b = tl.split(tl.reshape(pairs, (ROWS, BLOCK_HALF, 2)))
        a, b = _turn(a, b, c, s)
        pairs = tl.reshape(tl.join(a, b), (ROWS, 2 * BLOCK_HALF))
        tl.store(to_row + both * out_strides[3], pairs.to(out.dtype.element_ty), mask=mask)
    else:
        mask = there & (dims < HALF)
        a = tl.load(from_row + dims * x_strides[3], mask=mask).to(WIDE)
        b = tl.load(from_row + (HALF + dims) * x_strides[3], mask=mask).to(WIDE)
        a, b = _turn(a, b, c, s)
        tl.store(to_row + dims * out_strides[3], a.to(out.dtype.element_ty), mask=mask)
        tl.store(to_row + (HALF + dims) * out_strides[3], b.to(out.dtype.element_ty), mask=mask)
    if 2 * HALF < DIM:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = there & (rest < DIM)
        tl.store(to_row + rest * out_strides[3], tl.load(from_row + rest * x_strides[3], mask=mask), mask=mask)


def launch(
    x: torch.Tensor,
    out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offsets: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Writes x, rotated, to `out`. Both (B, H, N, D), of any strides."""
    batch, heads, rows, dim = x.shape
    if max(batch, heads) > _LARGEST_GRID:
        for b, h in itertools.product(range(0, batch, _LARGEST_GRID), range(0, heads, _LARGEST_GRID)):
            part = slice(b, b + _LARGEST_GRID), slice(h, h + _LARGEST_GRID)
            own = offsets if offsets is None or cu_seqlens is not None else offsets[part[0]]
            launch(x[part], out[part], cos, sin, own, cu_seqlens, interleaved=interleaved, inverse=inverse)
        return
    if x.numel() == 0:
        return
    positions, half = cos.shape
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    size = max(1, min(_ELEMENTS // triton.next_power_of_2(dim), triton.next_power_of_2(rows)))
    blocks = triton.cdiv(rows, size) + (sequences or 0)  # every packed sequence may have a block that is not full
    rotate_rows[(blocks, heads, batch)](
        x,
        x.stride(),
        out,
        out.stride(),
        cos,
        cos.stride(),
        sin,
        sin.stride(),
        offsets,
        cu_seqlens,
        sequences,
        rows,
        positions,
        half,
        dim,
        size,
        triton.next_power_of_2(half),
        triton.next_power_of_2(max(1, dim - 2 * half)),
        interleaved,
        inverse,
        tl.float64 if x.dtype == torch.float64 else tl.float32,
        enable_fp_fusion=True,
    )
