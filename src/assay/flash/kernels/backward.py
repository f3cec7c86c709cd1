"""Backward: P is computed again from the LSE, tile by tile.

    delta = rowsum(dO∘O) − dLSE,  P = 2^(S − LSE),  dP = dO·Vᵀ,  dS = P∘(dP − delta)
    dV = Pᵀ·dO,  dK = dSᵀ·Q·scale,  dQ = dS·K·scale

`attention_backward_kv` takes a block of keys over all rows that see it, in every query head of its group;
`attention_backward_q` a block of rows over all keys. S and dP are computed twice, 7 products instead of 5, but nothing
is added up in memory: the bits are the same every time, and small programs overlap well enough that this is faster
here than one pass with atomics (docs/log.md).
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from assay.flash.kernels.places import FIELDS
from assay.flash.kernels.tile import (
    LOG2_E,
    bias_of,
    bounds,
    kept,
    keys_of_rows,
    line_of,
    place_of,
    probabilities,
    rows_of_keys,
    slope_of,
    tail_of,
    unit_of,
    without,
)


@triton.jit
def attention_prepare_backward(
    out: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    dlse: tl.tensor,
    log2_lse: tl.tensor,
    delta: tl.tensor,
    dq_sums: tl.tensor,
    out_strides: tl.tuple,
    dout_strides: tl.tuple,
    dlse_strides: tl.tuple,
    places: tl.tensor,
    span: tl.tuple,
    room: tl.tensor,
    heads: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Grid: blocks of rows, heads, batch; packed: of all sequences, at `places` (see `count_places`).

    `log2_lse` and `delta` are (B·H, room). Rows that saw nothing get an LSE of +∞, so that their P is 0; and those that
    are not there, to the block's end. `dq_sums`, if any, (B·H, room, BLOCK_VALUE_DIM), becomes 0.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    block, sequence = tl.program_id(0), tl.program_id(2)
    if places is not None:
        if block >= tl.load(places):
            return
        sequence, block = tl.load(places + 1 + FIELDS * block), tl.load(places + 2 + FIELDS * block)
    first_row, _, length, _ = bounds(span, sequence)
    line_row = block * ROWS + tl.arange(0, ROWS)
    there = line_row < length
    row = (first_row + line_row).to(tl.int64)
    dims = tl.arange(0, BLOCK_VALUE_DIM)[None, :]
    mask = there[:, None] & (dims < VALUE_DIM)
    out += batch * out_strides[0] + head * out_strides[1]
    dout += batch * dout_strides[0] + head * dout_strides[1]
    o = tl.load(out + row[:, None] * out_strides[2] + dims * out_strides[3], mask=mask, other=0.0)
    do = tl.load(dout + row[:, None] * dout_strides[2] + dims * dout_strides[3], mask=mask, other=0.0)
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    value = tl.load(lse + (batch * heads + head) * span.queries + row, mask=there, other=float("-inf"))
    if dlse is not None:
        place_d = batch * dlse_strides[0] + head * dlse_strides[1] + row * dlse_strides[2]
        sums -= tl.load(dlse + place_d, mask=there, other=0.0)
    blind = value == float("-inf")
    place = (batch * heads + head) * room + line_of(span, sequence) + line_row
    tl.store(log2_lse + place, tl.where(blind, float("inf"), value * LOG2_E))
    tl.store(delta + place, tl.where(blind, 0.0, sums))
    if dq_sums is not None:
        tl.store(dq_sums + place[:, None] * BLOCK_VALUE_DIM + dims, tl.zeros((ROWS, BLOCK_VALUE_DIM), tl.float32))


@triton.jit
def _over_rows(
    dk: tl.tensor,
    dv: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q_tiles: tl.tensor_descriptor,
    do_tiles: tl.tensor_descriptor,
    lse_tiles: tl.tensor_descriptor,
    delta_tiles: tl.tensor_descriptor,
    first: tl.tensor,
    last: tl.tensor,
    batch: tl.tensor,
    head: tl.tensor,
    heads: tl.tensor,
    first_row: tl.tensor,
    line: tl.tensor,
    keys: tl.tensor,
    len_q: tl.tensor,
    len_k: tl.tensor,
    span: tl.tuple,
    scores: tl.tuple,
    slope: tl.tensor,
    bias: tl.tensor,
    dropout: tl.tuple,
    dropout_head: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    WANTED: tl.constexpr,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The blocks of rows from `first` to `last` of one query head; all tiles are (keys, rows).

    LAST: another packed sequence follows in the block, and its rows are left out.
    """
    for block in range(first, last):
        start = block * ROWS
        rows = start + tl.arange(0, ROWS)[None, :]
        q = q_tiles.load([batch, head, first_row + start, 0]).reshape(ROWS, BLOCK_DIM)
        do = do_tiles.load([batch, head, first_row + start, 0]).reshape(ROWS, BLOCK_VALUE_DIM)
        if LAST:
            q, do = without(q, start, len_q, ROWS), without(do, start, len_q, ROWS)
        lse_row = lse_tiles.load([batch * heads + head, line + start]).reshape(ROWS)
        leaning = 0.0
        if scores.near is not None:
            lse_row += slope * tl.arange(0, ROWS).to(tl.float32)
            leaning = slope / unit_of(scores) * (keys - (start + len_k - len_q)).to(tl.float32)
        p, bent = probabilities(
            tl.dot(k, q.T, input_precision=PRECISION), lse_row[None, :], rows, keys, len_q, len_k, span, scores,
            slope, bias, leaning, LINEAR, PRECISION == "ieee", MASKED,
        )  # fmt: skip
        factor = 1.0
        if dropout.seed is not None:
            factor = tl.where(kept(dropout, dropout_head, rows, keys), dropout.inverse, 0.0)
        if WANTED != "k":
            dv = tl.dot((p * factor).to(do.dtype), do, dv, input_precision=PRECISION)
        if WANTED != "v":
            dp = tl.dot(v, do.T, input_precision=PRECISION) * factor
            delta_row = delta_tiles.load([batch * heads + head, line + start]).reshape(ROWS)
            ds = p * (dp - delta_row[None, :])
            if scores.cap is not None:
                ds *= 1.0 - bent * bent
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def attention_backward_kv(
    q_tiles: tl.tensor_descriptor,
    k_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    do_tiles: tl.tensor_descriptor,
    dk_out: tl.tensor,
    dv_out: tl.tensor,
    dk_strides: tl.tuple,
    dv_strides: tl.tuple,
    lse_tiles: tl.tensor_descriptor,
    delta_tiles: tl.tensor_descriptor,
    span: tl.tuple,
    scores: tl.tuple,
    gradient_scale: tl.tensor,
    dropout: tl.tuple,
    heads: tl.tensor,
    group: tl.tensor,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    WANTED: tl.constexpr,
) -> None:
    """Grid: blocks of keys, heads of K and V, batch; packed: blocks of keys of all sequences, heads.

    WANTED is "kv", or "k" or "v" alone: with large heads the registers hold one sum at a time better than two.
    """
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    block = tl.program_id(0)
    sequence = batch
    if span.cu_q is not None:
        sequence, block, _ = place_of(span.cu_k, span.sequences, block, COLUMNS)
        if sequence == span.sequences:
            return
    first_row, first_key, len_q, len_k = bounds(span, sequence)
    line = line_of(span, sequence)
    start = block * COLUMNS
    key = start + tl.arange(0, COLUMNS)
    keys = key[:, None]
    k = k_tiles.load([batch, kv_head, first_key + start, 0]).reshape(COLUMNS, BLOCK_DIM)
    v = v_tiles.load([batch, kv_head, first_key + start, 0]).reshape(COLUMNS, BLOCK_VALUE_DIM)
    dk = tl.zeros((COLUMNS, BLOCK_DIM), tl.float32)
    dv = tl.zeros((COLUMNS, BLOCK_VALUE_DIM), tl.float32)
    begin, whole_begin, whole_end, end = rows_of_keys(start, len_q, len_k, span, ROWS, COLUMNS)
    tail = tail_of(whole_end, end, len_q, span, ROWS)
    if not SPLIT:
        whole_begin, whole_end = tail, tail
    for member in range(group):
        head = kv_head * group + member
        slope, bias = slope_of(scores, sequence, heads, head), bias_of(scores, batch, head)
        # Part 3, from `tail`: the block in which another packed sequence begins; without SPLIT all before it is part 0,
        # masked.
        for part in tl.static_range(4):
            if (SPLIT or part == 0 or part == 3) and (part != 3 or span.cu_q is not None):
                dk, dv = _over_rows(
                    dk, dv, k, v, q_tiles, do_tiles, lse_tiles, delta_tiles,
                    begin if part == 0 else (whole_begin if part == 1 else (whole_end if part == 2 else tail)),
                    whole_begin if part == 0 else (whole_end if part == 1 else (tail if part == 2 else end)),
                    batch, head, heads, first_row, line, keys, len_q, len_k, span, scores, slope, bias,
                    dropout, sequence * heads + head,
                    ROWS, BLOCK_DIM, BLOCK_VALUE_DIM, LINEAR, PRECISION, WANTED, part != 1, part == 3,
                )  # fmt: skip
    wide = (first_key + keys).to(tl.int64)
    if WANTED != "v":
        dims = tl.arange(0, BLOCK_DIM)[None, :]
        dk_out += batch.to(tl.int64) * dk_strides[0] + kv_head.to(tl.int64) * dk_strides[1]
        dk = (dk * gradient_scale).to(dk_out.dtype.element_ty)
        tl.store(dk_out + wide * dk_strides[2] + dims, dk, mask=(keys < len_k) & (dims < DIM))
    if WANTED != "k":
        value_dims = tl.arange(0, BLOCK_VALUE_DIM)[None, :]
        dv_out += batch.to(tl.int64) * dv_strides[0] + kv_head.to(tl.int64) * dv_strides[1]
        dv = dv.to(dv_out.dtype.element_ty)
        tl.store(dv_out + wide * dv_strides[2] + value_dims, dv, mask=(keys < len_k) & (value_dims < VALUE_DIM))


@triton.jit
def _over_keys(
    dq: tl.tensor,
    q: tl.tensor,
    do: tl.tensor,
    k_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    lse_row: tl.tensor,
    delta_row: tl.tensor,
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
    COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
) -> tl.tensor:
    """The blocks of keys from `first` to `last`; all tiles are (rows, keys). LAST as in `_over_rows`, of keys."""
    for block in range(first, last):
        start = block * COLUMNS
        keys = start + tl.arange(0, COLUMNS)[None, :]
        k = k_tiles.load([batch, kv_head, first_key + start, 0]).reshape(COLUMNS, BLOCK_DIM)
        v = v_tiles.load([batch, kv_head, first_key + start, 0]).reshape(COLUMNS, BLOCK_VALUE_DIM)
        if LAST:
            k, v = without(k, start, len_k, COLUMNS), without(v, start, len_k, COLUMNS)
        lse_here = lse_row
        if scores.near is not None:
            lse_here -= slope * (start - origin).to(tl.float32)
        p, bent = probabilities(
            tl.dot(q, k.T, input_precision=PRECISION), lse_here[:, None], rows, keys, len_q, len_k, span, scores,
            slope, bias, leaning, LINEAR, PRECISION == "ieee", MASKED,
        )  # fmt: skip
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        if dropout.seed is not None:
            dp = tl.where(kept(dropout, dropout_head, rows, keys), dp * dropout.inverse, 0.0)
        ds = p * (dp - delta_row[:, None])
        if scores.cap is not None:
            ds *= 1.0 - bent * bent
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def attention_backward_q(
    q_tiles: tl.tensor_descriptor,
    k_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    do_tiles: tl.tensor_descriptor,
    dq_out: tl.tensor,
    dq_strides: tl.tuple,
    lse_tiles: tl.tensor_descriptor,
    delta_tiles: tl.tensor_descriptor,
    span: tl.tuple,
    scores: tl.tuple,
    gradient_scale: tl.tensor,
    dropout: tl.tuple,
    heads: tl.tensor,
    group: tl.tensor,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Grid: blocks of rows, heads, batch; packed: blocks of rows of all sequences, heads."""
    head, batch = tl.program_id(1), tl.program_id(2)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = batch
    if span.cu_q is not None:
        sequence, block, blocks = place_of(span.cu_q, span.sequences, tl.program_id(0), ROWS)
        if sequence == span.sequences:
            return
        block = blocks - 1 - block
    first_row, first_key, len_q, len_k = bounds(span, sequence)
    line = line_of(span, sequence)
    start = block * ROWS
    rows = start + tl.arange(0, ROWS)[:, None]
    slope, bias = slope_of(scores, sequence, heads, head), bias_of(scores, batch, head)
    q = q_tiles.load([batch, head, first_row + start, 0]).reshape(ROWS, BLOCK_DIM)
    do = do_tiles.load([batch, head, first_row + start, 0]).reshape(ROWS, BLOCK_VALUE_DIM)
    lse_row = lse_tiles.load([batch * heads + head, line + start]).reshape(ROWS)
    delta_row = delta_tiles.load([batch * heads + head, line + start]).reshape(ROWS)
    origin = start + len_k - len_q
    leaning = 0.0
    if scores.near is not None:
        lse_row += slope * tl.arange(0, ROWS).to(tl.float32)
        leaning = slope / unit_of(scores) * tl.arange(0, COLUMNS)[None, :].to(tl.float32)
    dq = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    begin, whole_begin, whole_end, end = keys_of_rows(start, len_q, len_k, span, ROWS, COLUMNS)
    tail = tail_of(whole_end, end, len_k, span, COLUMNS)
    if not SPLIT:
        whole_begin, whole_end = tail, tail
    # As in `attention_backward_kv`; with SPLIT part 0 is the window's left edge.
    for part in tl.static_range(4):
        if (span.left is not None or part != 0 if SPLIT else part == 0 or part == 3) and (
            part != 3 or span.cu_q is not None
        ):
            dq = _over_keys(
                dq, q, do, k_tiles, v_tiles, lse_row, delta_row,
                begin if part == 0 else (whole_begin if part == 1 else (whole_end if part == 2 else tail)),
                whole_begin if part == 0 else (whole_end if part == 1 else (tail if part == 2 else end)),
                batch, head // group, first_key, rows, len_q, len_k, span, scores, slope, bias, origin, leaning,
                dropout, sequence * heads + head,
                COLUMNS, BLOCK_DIM, BLOCK_VALUE_DIM, LINEAR, PRECISION, part != 1, part == 3,
            )  # fmt: skip
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    dq_out += batch.to(tl.int64) * dq_strides[0] + head.to(tl.int64) * dq_strides[1]
    dq = (dq * gradient_scale).to(dq_out.dtype.element_ty)
    tl.store(dq_out + (first_row + rows).to(tl.int64) * dq_strides[2] + dims, dq, mask=(rows < len_q) & (dims < DIM))


@triton.jit
def attention_cast_dq(
    sums: tl.tensor,
    dq: tl.tensor,
    dq_strides: tl.tuple,
    places: tl.tensor,
    span: tl.tuple,
    scale: tl.tensor,
    room: tl.tensor,
    heads: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """What `hopper_backward_sums.add_q` added up in the threads' order: put in order, scaled and cast.

    Grid: blocks of 64 rows times BLOCK_DIM / 64, heads, batch. `places` of packed ones are of 128 rows.
    """
    DIM_PARTS: tl.constexpr = BLOCK_DIM // 64
    head, batch = tl.program_id(1), tl.program_id(2)
    block, part, sequence = tl.program_id(0) // DIM_PARTS, tl.program_id(0) % DIM_PARTS, tl.program_id(2)
    if places is not None:
        two = block // 2
        if two >= tl.load(places):
            return
        place = places + 1 + FIELDS * two
        sequence, block = tl.load(place), tl.load(place + 1) * 2 + block % 2
    first_row, _, length, _ = bounds(span, sequence)
    line = (batch * heads + head).to(tl.int64) * room + line_of(span, sequence) + block * 64
    x = tl.load(sums + (line // 64 * DIM_PARTS + part) * 4096 + tl.arange(0, 4096)) * scale
    x = tl.reshape(tl.permute(tl.reshape(x.to(dq.dtype.element_ty), (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5)), (64, 64))
    row = block * 64 + tl.arange(0, 64)[:, None]
    dims = part * 64 + tl.arange(0, 64)[None, :]
    dq += batch.to(tl.int64) * dq_strides[0] + head.to(tl.int64) * dq_strides[1]
    tl.store(dq + (first_row + row).to(tl.int64) * dq_strides[2] + dims, x, mask=(row < length) & (dims < DIM))
