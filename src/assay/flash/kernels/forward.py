"""Forward: a program takes some rows of one head over all the blocks of keys that they see.

Running maximum m, row sum l and output O in FP32, in units of log₂:
    S = Q·Kᵀ·scale,  m' = max(m, rowmax S),  P = 2^(S − m'),  l ← l·2^(m − m') + rowsum P,  O ← O·2^(m − m') + P·V
and at the end O / l, LSE = m + log l. The knobs round P, l, O and 2^(m − m') on the way.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from assay.flash.kernels.tile import (
    LN_2,
    LOG2_E,
    adjust,
    bend,
    bias_of,
    bounds,
    kept,
    keys_of_rows,
    place_of,
    slope_of,
    unit_of,
    visible,
    without,
)


class Knobs(NamedTuple):
    """`Numerics` as the kernel takes them: all compile-time."""

    pieces: Any
    """P enters its product as the sum of so many values in the format of V."""
    probabilities: Any
    row_sum: Any
    rescale: Any
    output_accumulator: Any
    sum_after_cast: Any
    reverse_keys: Any


@triton.jit
def hold(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Round to the format of a knob and back; "fp32" leaves it."""
    if FORMAT == "bf16":
        return x.to(tl.bfloat16).to(tl.float32)
    elif FORMAT == "fp16":
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def _times_v(total: tl.tensor, p: tl.tensor, v: tl.tensor, PIECES: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Total + P·V; a P wider than V goes in as two values of its format, 16 bits of P with bf16, 22 with fp16."""
    total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)
    if PIECES > 1:
        rest = p - p.to(v.dtype).to(tl.float32)
        total = tl.dot(rest.to(v.dtype), v, total, input_precision=PRECISION)
    return total


@triton.jit
def _over_blocks(
    output: tl.tensor,
    row_sum: tl.tensor,
    maximum: tl.tensor,
    q: tl.tensor,
    k_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    first: tl.tensor,
    last: tl.tensor,
    batch: tl.tensor,
    kv_head: tl.tensor,
    first_key: tl.tensor,
    rows: tl.tensor,
    len_q: tl.tensor,
    len_k: tl.tensor,
    span: tl.tuple,
    scores: tl.tuple,
    slope: tl.tensor,
    bias: tl.tensor,
    origin: tl.tensor,
    leaning: tl.tensor,
    dropout: tl.tuple,
    dropout_head: tl.tensor,
    knobs: tl.tuple,
    COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The blocks of keys from `first` to `last`, all of them masked or none."""
    for step in range(first, last):
        block = first + last - 1 - step if knobs.reverse_keys else step
        start = block * COLUMNS
        keys = start + tl.arange(0, COLUMNS)[None, :]
        k = k_tiles.load([batch, kv_head, first_key + start, 0]).reshape(COLUMNS, BLOCK_DIM)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        unit = 1.0
        ahead = 0.0
        if LINEAR:
            s, unit = bend(s, scores, PRECISION == "ieee")
            if scores.near is not None:
                s += leaning
                ahead = slope * (start - origin).to(tl.float32)
        else:
            s, _ = adjust(s, rows, keys, len_q, len_k, slope, bias, scores, PRECISION == "ieee")
        if MASKED:
            s = tl.where(visible(rows, keys, len_q, len_k, span), s, float("-inf"))
        if LINEAR:  # the maximum first, then its unit: one multiplication a row
            latest = tl.maximum(maximum, tl.max(s, 1) * unit + ahead)
        else:
            latest = tl.maximum(maximum, tl.max(s, 1))
        # A row that has seen no key yet: exp2(−inf − 0) is the 0 that it should be.
        reference = latest
        if MASKED or not LINEAR:
            reference = tl.where(latest == float("-inf"), 0.0, latest)
        if LINEAR:
            p = tl.exp2(s * unit - (reference - ahead)[:, None])
        else:
            p = tl.exp2(s - reference[:, None])
        cast = hold(p, knobs.probabilities)
        block_sum = tl.sum(cast if knobs.sum_after_cast else p, 1)
        factor = hold(tl.exp2(hold(maximum - reference, knobs.rescale)), knobs.rescale)
        row_sum = hold(hold(row_sum * factor, knobs.row_sum) + hold(block_sum, knobs.row_sum), knobs.row_sum)
        if dropout.seed is not None:
            cast = tl.where(kept(dropout, dropout_head, rows, keys), cast, 0.0)
        v = v_tiles.load([batch, kv_head, first_key + start, 0]).reshape(COLUMNS, BLOCK_VALUE_DIM)
        if MASKED and span.cu_q is not None:
            v = without(v, start, len_k, COLUMNS)
        if knobs.output_accumulator == "fp32":
            output = _times_v(output * factor[:, None], cast, v, knobs.pieces, PRECISION)
        else:
            product = _times_v(tl.zeros_like(output), cast, v, knobs.pieces, PRECISION)
            output = hold(output * factor[:, None], knobs.output_accumulator)
            output = hold(output + hold(product, knobs.output_accumulator), knobs.output_accumulator)
        maximum = latest
    return output, row_sum, maximum


@triton.jit
def attention_forward(
    q_tiles: tl.tensor_descriptor,
    k_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    out: tl.tensor,
    out_strides: tl.tuple,
    lse: tl.tensor,
    sinks: tl.tensor,
    span: tl.tuple,
    scores: tl.tuple,
    dropout: tl.tuple,
    knobs: tl.tuple,
    heads: tl.tensor,
    group: tl.tensor,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid: blocks of rows, heads, batch; packed: blocks of rows of all sequences, heads. `lse` is (B, H, rows)."""
    head, batch = tl.program_id(1), tl.program_id(2)
    # With a causal mask the last rows see the most keys: those programs start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = batch
    if span.cu_q is not None:
        sequence, block, blocks = place_of(span.cu_q, span.sequences, tl.program_id(0), ROWS)
        if sequence == span.sequences:
            return
        block = blocks - 1 - block
    first_row, first_key, len_q, len_k = bounds(span, sequence)
    rows = block * ROWS + tl.arange(0, ROWS)
    tall = rows[:, None]
    slope, bias = slope_of(scores, sequence, heads, head), bias_of(scores, batch, head)
    q = q_tiles.load([batch, head, first_row + block * ROWS, 0]).reshape(ROWS, BLOCK_DIM)
    # Near ALiBi counts keys from the first row's position: what a row's own position adds to its scores.
    origin = block * ROWS + len_k - len_q
    leaning = 0.0
    tilt = tl.zeros((ROWS,), tl.float32)
    if scores.near is not None:
        tilt = slope * tl.arange(0, ROWS).to(tl.float32)
        leaning = slope / unit_of(scores) * tl.arange(0, COLUMNS)[None, :].to(tl.float32)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:  # one more key, which has no value
        maximum = tilt + tl.load(sinks + head).to(tl.float32) * LOG2_E
        row_sum += 1.0
    output = tl.zeros((ROWS, BLOCK_VALUE_DIM), tl.float32)
    begin, whole_begin, whole_end, end = keys_of_rows(block * ROWS, len_q, len_k, span, ROWS, COLUMNS)
    for part in tl.static_range(3):
        which = 2 - part if knobs.reverse_keys else part
        if which != 0 or span.left is not None:
            output, row_sum, maximum = _over_blocks(
                output, row_sum, maximum, q, k_tiles, v_tiles,
                begin if which == 0 else (whole_begin if which == 1 else whole_end),
                whole_begin if which == 0 else (whole_end if which == 1 else end),
                batch, head // group, first_key, tall, len_q, len_k, span, scores, slope, bias, origin, leaning,
                dropout, sequence * heads + head, knobs,
                COLUMNS, BLOCK_DIM, BLOCK_VALUE_DIM, LINEAR, PRECISION, which != 1,
            )  # fmt: skip
    output *= (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    if dropout.seed is not None:
        output *= dropout.inverse
    dims = tl.arange(0, BLOCK_VALUE_DIM)[None, :]
    out += batch.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    place = (first_row + tall).to(tl.int64) * out_strides[2] + dims
    tl.store(out + place, output.to(out.dtype.element_ty), mask=(tall < len_q) & (dims < VALUE_DIM))
    lse += (batch * heads + head).to(tl.int64) * span.queries + first_row
    tl.store(lse + rows, (maximum + tl.log2(row_sum) - tilt) * LN_2, mask=rows < len_q)
