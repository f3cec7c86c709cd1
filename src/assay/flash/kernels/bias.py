"""The gradient of the bias: dS itself, summed over what the bias is broadcast over."""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from assay.flash.kernels.tile import bias_of, kept, probabilities, slope_of


@triton.jit
def attention_backward_bias(
    q_tiles: tl.tensor_descriptor,
    k_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    do_tiles: tl.tensor_descriptor,
    dbias: tl.tensor,
    dbias_strides: tl.tuple,
    lse_tiles: tl.tensor_descriptor,
    delta_tiles: tl.tensor_descriptor,
    span: tl.tuple,
    scores: tl.tuple,
    dropout: tl.tuple,
    summed: tl.tuple,
    heads: tl.tensor,
    group: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_KEYS: tl.constexpr,
) -> None:
    """Grid: tiles, heads and batches of the bias. A program sums over `summed` batches, heads, row and key blocks."""
    across = tl.cdiv(span.keys, COLUMNS) // summed[3]  # tiles of the bias side by side
    row_block, key_block = tl.program_id(0) // across, tl.program_id(0) % across
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(summed[0]):
        batch = tl.program_id(2) + i
        for j in range(summed[1]):
            head = tl.program_id(1) + j
            slope, bias = slope_of(scores, batch, heads, head), bias_of(scores, batch, head)
            for m in range(summed[2]):
                first = (row_block + m) * ROWS
                rows = first + tl.arange(0, ROWS)[:, None]
                q = q_tiles.load([batch, head, first, 0]).reshape(ROWS, BLOCK_DIM)
                do = do_tiles.load([batch, head, first, 0]).reshape(ROWS, BLOCK_VALUE_DIM)
                lse_row = lse_tiles.load([batch * heads + head, first]).reshape(ROWS)
                delta_row = delta_tiles.load([batch * heads + head, first]).reshape(ROWS)
                for n in range(summed[3]):
                    start = (key_block + n) * COLUMNS
                    keys = start + tl.arange(0, COLUMNS)[None, :]
                    k = k_tiles.load([batch, head // group, start, 0]).reshape(COLUMNS, BLOCK_DIM)
                    v = v_tiles.load([batch, head // group, start, 0]).reshape(COLUMNS, BLOCK_VALUE_DIM)
                    p, _ = probabilities(
                        tl.dot(q, k.T, input_precision=PRECISION), lse_row[:, None], rows, keys,
                        span.queries, span.keys, span, scores, slope, bias, 0, False, PRECISION == "ieee", True,
                    )  # fmt: skip
                    dp = tl.dot(do, v.T, input_precision=PRECISION)
                    if dropout.seed is not None:
                        dp = tl.where(kept(dropout, batch * heads + head, rows, keys), dp * dropout.inverse, 0.0)
                    total += p * (dp - delta_row[:, None])  # the bias comes after the softcap: no derivative of tanh
    row = row_block * ROWS + tl.arange(0, ROWS)[:, None]
    key = key_block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < span.queries) & (key < span.keys)
    if SUM_ROWS:
        total = tl.sum(total, 0, keep_dims=True)
        row, there = tl.zeros_like(row), there & (row == 0)
    if SUM_KEYS:
        total = tl.sum(total, 1, keep_dims=True)
        key, there = tl.zeros_like(key), there & (key == 0)
    dbias += tl.program_id(2).to(tl.int64) * dbias_strides[0] + tl.program_id(1).to(tl.int64) * dbias_strides[1]
    place = row.to(tl.int64) * dbias_strides[2] + key.to(tl.int64) * dbias_strides[3]
    total = tl.broadcast_to(total, (ROWS, COLUMNS)).to(dbias.dtype.element_ty)
    tl.store(dbias + place, total, mask=there)
