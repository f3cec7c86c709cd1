"""To 8 bits in one reading: rotation, the largest number of a block, its scale, the cast; V also transposed."""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(x: tl.tensor) -> tl.tensor:
    """The smallest power of two that is not less."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def in_thread_order(keys: tl.tensor) -> tl.tensor:
    """(D, keys) with the keys as `hopper_fp8.in_thread_order` has those of P."""
    dim: tl.constexpr = keys.shape[0]
    number: tl.constexpr = keys.shape[1]
    keys = tl.reshape(keys, (dim, number // 16, 2, 4, 2))
    return tl.reshape(tl.permute(keys, (0, 1, 3, 2, 4)), (dim, number))


@triton.jit
def quantize_block(
    x: tl.tensor,
    x_strides: tl.tuple,
    matrix: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    GIVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> None:
    """Grid: blocks of rows, heads, batch.

    Scales are (B, H, blocks), read if GIVEN, else written. `out` is (B, H, rows, BLOCK_DIM), or TRANSPOSED
    (B, H, BLOCK_DIM, whole blocks of keys); None: only the scales are wanted. `matrix` is ±1, or None.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = batch * tl.num_programs(1) + head
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    x += batch.to(tl.int64) * x_strides[0] + head.to(tl.int64) * x_strides[1]
    there = (row < rows) & (dim < DIM)
    numbers = tl.load(x + row.to(tl.int64) * x_strides[2] + dim * x_strides[3], mask=there, other=0.0)
    if matrix is not None:
        turn = tl.load(matrix + tl.arange(0, BLOCK_DIM)[:, None] * BLOCK_DIM + dim)
        numbers = tl.dot(numbers, turn, input_precision="ieee") * (BLOCK_DIM**-0.5)
    else:
        numbers = numbers.to(tl.float32)
    scales += line * tl.num_programs(0) + block
    if GIVEN:
        scale = tl.load(scales)
    else:
        largest = tl.max(tl.max(tl.abs(numbers), 1), 0)
        scale = power_of_two(tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST))
        tl.store(scales, scale)
    if out is not None:
        values = (numbers * (1.0 / scale)).to(out.dtype.element_ty)
        if TRANSPOSED:
            out += line.to(tl.int64) * BLOCK_DIM * tl.num_programs(0) * ROWS
            values = in_thread_order(tl.trans(values))
            key = block * ROWS + tl.arange(0, ROWS)[None, :]
            tl.store(out + tl.arange(0, BLOCK_DIM)[:, None].to(tl.int64) * (tl.num_programs(0) * ROWS) + key, values)
        else:
            out += line.to(tl.int64) * rows * BLOCK_DIM
            tl.store(out + row.to(tl.int64) * BLOCK_DIM + dim, values, mask=row < rows)
