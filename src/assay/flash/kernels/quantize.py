"""To 8 bits in one reading: rotation, the largest number of a block, its scale, the cast; V also transposed."""

# mypy: disable-error-code="untyped-decorator, assignment, misc, unreachable, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)
"""The bits of infinity in FP32: of other numbers' sizes, only NaN's are larger."""


@triton.jit
def size_of(x: tl.tensor) -> tl.tensor:
    """The bits of |x| in FP32, which are ordered as the numbers are."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power_of_two(x: tl.tensor) -> tl.tensor:
    """The smallest power of two that is not less."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def in_thread_order(keys: tl.tensor) -> tl.tensor:
    """(D, keys) with the keys as `hopper_fp8_softmax.in_thread_order` has those of P."""
    dim: tl.constexpr = keys.shape[0]
    number: tl.constexpr = keys.shape[1]
    keys = tl.reshape(keys, (dim, number // 16, 2, 4, 2))
    return tl.reshape(tl.permute(keys, (0, 1, 3, 2, 4)), (dim, number))


@triton.jit
def matrix(turns: tl.tensor, i: tl.constexpr) -> tl.tensor:
    """The ith of 64 × 64."""
    return tl.load(turns + i * 4096 + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :])


@triton.jit
def rotated(parts: tl.tuple, turns: tl.tensor, kept: tl.tuple) -> tl.tuple:
    """Parts of 64 dimensions, together times `fp8.rotation` · √D: each times the signed Hadamard matrix of its 64 rows,
    then sums and differences of parts. Matrices that are not `kept` are read.
    """
    number: tl.constexpr = len(parts)
    turned = ()
    for i in tl.static_range(number):
        if len(kept) > 0:
            turn = kept[i]
        else:
            turn = matrix(turns, i)
        turned += (tl.dot(parts[i], turn, input_precision="ieee"),)
    if number == 2:
        turned = (turned[0] + turned[1], turned[0] - turned[1])
    if number == 4:
        a, b, c, d = turned[0] + turned[1], turned[0] - turned[1], turned[2] + turned[3], turned[2] - turned[3]
        turned = (a + c, b + d, a - c, b - d)
    return turned


@triton.jit
def largest_of(parts: tl.tuple) -> tl.tensor:
    """The largest size of a finite number."""
    sizes = size_of(parts[0])
    for i in tl.static_range(1, len(parts)):
        sizes = tl.maximum(sizes, size_of(parts[i]))
    largest = tl.max(tl.max(sizes, 1), 0)
    if largest >= INFINITE:  # seldom: all are looked at again
        largest = 0
        for i in tl.static_range(len(parts)):
            sizes = size_of(parts[i])
            largest = tl.maximum(largest, tl.max(tl.max(tl.where(sizes < INFINITE, sizes, 0), 1), 0))
    return largest.to(tl.float32, bitcast=True)


@triton.jit
def longest_of(parts: tl.tuple, most: tl.constexpr) -> tl.tensor:
    """The length of the longest row, of numbers that are finite, over what it may be."""
    squares = squares_of(parts, 1.0, False)
    longest = tl.div_rn(tl.sqrt_rn(tl.max(squares, 0)), most)
    if not tl.sum(squares, 0) < float("inf"):  # seldom: of infinities, of NaN, and of what has no square in FP32
        unit = power_of_two(tl.maximum(largest_of(parts) * 2.0**-20, 2.0**-64))
        longest = tl.div_rn(tl.sqrt_rn(tl.max(squares_of(parts, 1.0 / unit, True), 0)), most) * unit
    return longest


@triton.jit
def squares_of(parts: tl.tuple, factor: tl.tensor, FINITE: tl.constexpr) -> tl.tensor:
    """Of each row the sum, of its numbers times the factor; FINITE: of those that are finite."""
    squares = squares_in(parts[0], factor, FINITE)
    for i in tl.static_range(1, len(parts)):
        squares += squares_in(parts[i], factor, FINITE)
    return squares


@triton.jit
def squares_in(part: tl.tensor, factor: tl.tensor, FINITE: tl.constexpr) -> tl.tensor:
    """Of one part."""
    if FINITE:
        part = tl.where(size_of(part) < INFINITE, part, 0.0)
    wide = part.to(tl.float32) * factor
    return tl.sum(wide * wide, 1)


@triton.jit
def find_centres(
    x: tl.tensor,
    x_strides: tl.tuple,
    centres: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HUGE: tl.constexpr,
) -> None:
    """`fp8.centres` of WIDTH dimensions of one head, ROWS read at once: (B, H, BLOCK_DIM)."""
    line = tl.program_id(0)
    dim = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    start = x + (line // heads).to(tl.int64) * x_strides[0] + (line % heads).to(tl.int64) * x_strides[1]
    start += dim[None, :] * x_strides[3]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    number = tl.zeros((ROWS, WIDTH), tl.float32)
    largest = tl.zeros((ROWS, WIDTH), tl.int32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        there = (row < rows) & (dim < DIM)[None, :]
        part = tl.load(start + row.to(tl.int64) * x_strides[2], mask=there, other=0.0)
        sizes = size_of(part)
        there &= sizes < INFINITE
        total += tl.where(there, part.to(tl.float32), 0.0)
        number += there.to(tl.float32)
        largest = tl.maximum(largest, tl.where(there, sizes, 0))
    mean = tl.div_rn(tl.sum(total, 0), tl.maximum(tl.sum(number, 0), 1.0))
    most = tl.max(largest, 0)
    step = tl.maximum((most & INFINITE) - (7 << 23), 1 << 23).to(tl.float32, bitcast=True)
    centre = tl.where(most.to(tl.float32, bitcast=True) < HUGE, tl.floor(tl.div_rn(mean, step) + 0.5) * step, 0.0)
    tl.store(centres + line.to(tl.int64) * BLOCK_DIM + dim, centre)


@triton.jit
def quantize_blocks(
    x: tl.tensor,
    x_strides: tl.tuple,
    centres: tl.tensor,
    turns: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    blocks: tl.tensor,
    total: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    LONGEST: tl.constexpr,
    GIVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A program takes some of the `total` blocks of rows, `blocks` to a head; with STAGES > 1 the next is read already.

    Scales are (B, H, blocks), read if GIVEN, else written; LONGEST, if not None, is the longest row that they make.
    `out` is (B, H, rows, BLOCK_DIM), or TRANSPOSED
    (B, H, BLOCK_DIM, whole blocks of keys); None: only the scales are wanted. For `turns`, which may be None, see
    `rotated`: with them 64 dimensions are taken at a time, else all at once. `centres`, if not None, are taken off, but
    for a first block.
    """
    PARTS: tl.constexpr = 1 if turns is None else BLOCK_DIM // 64
    WIDTH: tl.constexpr = BLOCK_DIM // PARTS
    UNIT: tl.constexpr = 1.0 if turns is None else BLOCK_DIM**-0.5
    kept = ()
    if turns is not None and STAGES > 1:  # else shared memory is short
        for i in tl.static_range(PARTS):
            kept += (matrix(turns, i),)
    dim = tl.arange(0, WIDTH)[None, :]
    for number in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        line, block = number // blocks, number % blocks
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        start = x + (line // heads).to(tl.int64) * x_strides[0] + (line % heads).to(tl.int64) * x_strides[1]
        start += row.to(tl.int64) * x_strides[2]
        parts = ()
        for i in tl.static_range(PARTS):
            there = (row < rows) & (i * WIDTH + dim < DIM)
            part = tl.load(start + (i * WIDTH + dim) * x_strides[3], mask=there, other=0.0)
            if centres is not None:
                off = tl.load(centres + line.to(tl.int64) * BLOCK_DIM + i * WIDTH + tl.arange(0, WIDTH))
                off = tl.where(block > 0, off, 0.0)
                less = tl.where(there, part.to(tl.float32) - off[None, :], 0.0)
                part = less if part.dtype.primitive_bitwidth == 32 else less.to(tl.bfloat16)
            parts += (part,)
        if turns is not None:
            parts = rotated(parts, turns, kept)
        if GIVEN:
            scale = tl.load(scales + number)
        else:
            if LONGEST is not None:
                most = longest_of(parts, LONGEST) * UNIT
            else:
                most = tl.div_rn(largest_of(parts) * UNIT, LARGEST)
            scale = power_of_two(tl.maximum(most, SMALLEST))
            tl.store(scales + number, scale)
        if out is not None:
            for i in tl.static_range(PARTS):
                wide = parts[i].to(tl.float32)
                nothing = wide - wide  # but of infinities NaN: a cast would make them the largest number
                values = (wide * (UNIT / scale) + nothing).to(out.dtype.element_ty)
                if TRANSPOSED:
                    place = out + line.to(tl.int64) * BLOCK_DIM * blocks * ROWS
                    place += tl.arange(0, WIDTH)[:, None].to(tl.int64) * (blocks * ROWS)
                    key = block * ROWS + tl.arange(0, ROWS)[None, :]
                    tl.store(place + key, in_thread_order(tl.trans(values)))
                else:
                    place = out + line.to(tl.int64) * rows * BLOCK_DIM + row.to(tl.int64) * BLOCK_DIM
                    tl.store(place + i * WIDTH + dim, values, mask=row < rows)
