"""Decoding: a few queries against a long cache of keys, which many programs share out and a second kernel joins.

The query heads of one KV head stand in one tile, row = query · group + head of the group, so that K and V are read
once. A program takes one share of the keys that its rows see, and leaves its normalised output and LSE; with one share
that is the result. Scores and LSE are in units of log₂ until the end.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from assay.flash.kernels.tile import LN_2, LOG2_E, adjust, visible


@triton.jit
def _reach(first: tl.tensor, last: tl.tensor, length: tl.tensor, span: tl.tuple) -> tuple[tl.tensor, tl.tensor]:
    """The keys that queries `first` to `last` see, one or another of them: from low to below high."""
    shift = length - span.queries
    low, high = 0, length
    if span.right is not None:
        high = tl.minimum(high, last + shift + span.right + 1)
    if span.left is not None:
        low = tl.maximum(first + shift - span.left, 0)
    return low, high


@triton.jit
def _share(
    split: tl.tensor, low: tl.tensor, high: tl.tensor, splits: tl.tensor, least: tl.tensor, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The blocks of keys of one split: all alike but the last, of `least` blocks or more. May be none."""
    begin, end = low // COLUMNS, tl.cdiv(tl.maximum(high, 0), COLUMNS)
    blocks = tl.maximum(tl.cdiv(tl.maximum(end - begin, 0), splits), least)
    begin += split * blocks
    return begin, tl.minimum(begin + blocks, end)


@triton.jit
def _places(
    table: tl.tensor,
    strides: tl.tuple,
    batch: tl.tensor,
    start: tl.tensor,
    keys: tl.tensor,
    seen: tl.tensor,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Which sequence or page of the cache each key is in, and its number there."""
    if PAGE is None:
        return batch.to(tl.int64), keys.to(tl.int64)
    else:
        table += batch.to(tl.int64) * strides[0]
        if PAGE % COLUMNS == 0:  # a block of keys never leaves its page
            page = tl.load(table + start // PAGE * strides[1])
            return page.to(tl.int64), (start % PAGE + tl.arange(0, COLUMNS)).to(tl.int64)
        else:
            page = tl.load(table + keys // PAGE * strides[1], mask=seen, other=0)
            return page.to(tl.int64), (keys % PAGE).to(tl.int64)


@triton.jit
def _rows_of(
    base: tl.tensor,
    strides: tl.tuple,
    page: tl.tensor,
    place: tl.tensor,
    kv_head: tl.tensor,
    seen: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """A tile of K or V, with 0 for keys that no row sees: what is there may be NaN, and 0·NaN is NaN."""
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    mask = seen[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (dims < DIM)
    first = page * strides[0] + kv_head.to(tl.int64) * strides[1] + place * strides[2]
    return tl.load(base + first[:, None] + dims * strides[3], mask=mask, other=0.0)


@triton.jit
def _with_sink(output: tl.tensor, total: tl.tensor, sink: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Output and LSE with one more key, which has no value."""
    sink = sink.to(tl.float32) * LOG2_E
    top = tl.maximum(total, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(total - top)
    both = weight + tl.exp2(sink - top)
    return output * (weight / tl.where(both == 0.0, 1.0, both))[:, None], top + tl.log2(both)


@triton.jit(do_not_specialize=["longest"])
def attention_decode(
    q: tl.tensor,
    q_strides: tl.tuple,
    k: tl.tensor,
    k_strides: tl.tuple,
    v: tl.tensor,
    v_strides: tl.tuple,
    lengths: tl.tensor,
    table: tl.tensor,
    table_strides: tl.tuple,
    out: tl.tensor,
    out_strides: tl.tuple,
    lse: tl.tensor,
    lse_strides: tl.tuple,
    sinks: tl.tensor,
    span: tl.tuple,
    scores: tl.tuple,
    longest: tl.tensor,
    heads: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid: splits of blocks of rows of sequences, KV heads. `out` and `lse` are (splits, B, H, queries, …).

    K and V have strides of sequence (paged: page), KV head, key, dimension. `lengths`: (B,) int32, or None for
    `longest`, each of them. `table`: (B, pages of a sequence) int32. WHOLE: there is one split, and what is written is
    the result.
    """
    kv_head = tl.program_id(1)
    split, block = tl.program_id(0) % splits, tl.program_id(0) // splits
    row_blocks = tl.cdiv(span.queries * GROUP, ROWS)
    batch, block = block // row_blocks, block % row_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    queries, of_heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    there = rows < span.queries * GROUP

    length = longest
    if lengths is not None:  # no longer than the cache, whatever a replayed graph finds there
        length = tl.minimum(tl.load(lengths + batch), longest)
    last_row = tl.minimum(block * ROWS + ROWS, span.queries * GROUP) - 1
    low, high = _reach(block * ROWS // GROUP, last_row // GROUP, length, span)
    begin, end = _share(split, low, high, splits, least, COLUMNS)
    lse += split.to(tl.int64) * lse_strides[0] + batch.to(tl.int64) * lse_strides[1]
    lse += of_heads.to(tl.int64) * lse_strides[2] + queries.to(tl.int64) * lse_strides[3]
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    if not WHOLE and begin >= end:
        tl.store(lse, maximum, mask=there)
        return

    slope = 0.0
    if scores.slopes is not None:
        slope = tl.load(scores.slopes + batch * heads + of_heads, mask=there, other=0.0)[:, None] * LOG2_E
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    q += batch.to(tl.int64) * q_strides[0]
    q_rows = of_heads.to(tl.int64) * q_strides[1] + queries.to(tl.int64) * q_strides[2]
    q_tile = tl.load(q + q_rows[:, None] + dims * q_strides[3], mask=there[:, None] & (dims < DIM), other=0.0)
    row_sum = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, BLOCK_VALUE_DIM), tl.float32)
    for key_block in range(begin, end):
        start = key_block * COLUMNS
        keys = start + tl.arange(0, COLUMNS)
        seen = (keys >= low) & (keys < high)
        page, place = _places(table, table_strides, batch, start, keys, seen, PAGE, COLUMNS)
        k_tile = _rows_of(k, k_strides, page, place, kv_head, seen, DIM, BLOCK_DIM)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        tall, wide = queries[:, None], keys[None, :]
        s, _ = adjust(s, tall, wide, span.queries, length, slope, None, scores, PRECISION == "ieee")
        s = tl.where(visible(tall, wide, span.queries, length, span), s, float("-inf"))
        latest = tl.maximum(maximum, tl.max(s, 1))
        # A row that has seen no key yet: exp2(−inf − 0) is the 0 that it should be.
        reference = tl.where(latest == float("-inf"), 0.0, latest)
        p = tl.exp2(s - reference[:, None])
        factor = tl.exp2(maximum - reference)
        row_sum = row_sum * factor + tl.sum(p, 1)
        v_tile = _rows_of(v, v_strides, page, place, kv_head, seen, VALUE_DIM, BLOCK_VALUE_DIM)
        output = tl.dot(p.to(v_tile.dtype), v_tile, output * factor[:, None], input_precision=PRECISION)
        maximum = latest

    output /= tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    total = maximum + tl.log2(row_sum)
    if WHOLE:
        if sinks is not None:
            output, total = _with_sink(output, total, tl.load(sinks + of_heads, mask=there, other=0.0))
        total *= LN_2
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)[None, :]
    out += split.to(tl.int64) * out_strides[0] + batch.to(tl.int64) * out_strides[1]
    out_rows = of_heads.to(tl.int64) * out_strides[2] + queries.to(tl.int64) * out_strides[3]
    mask = there[:, None] & (value_dims < VALUE_DIM)
    tl.store(out + out_rows[:, None] + value_dims, output.to(out.dtype.element_ty), mask=mask)
    tl.store(lse, total, mask=there)


@triton.jit
def merge_splits(
    parts: tl.tensor,
    part_strides: tl.tuple,
    part_lse: tl.tensor,
    part_lse_strides: tl.tuple,
    out: tl.tensor,
    out_strides: tl.tuple,
    lse: tl.tensor,
    lse_strides: tl.tuple,
    sinks: tl.tensor,
    splits: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The splits' outputs, each with its share of the sum of exponentials. Grid: rows of all heads and sequences.

    PARTS splits are added up at a time, always the same ones: splits without keys, however many, change no bit.
    """
    query = (tl.program_id(0) % queries).to(tl.int64)
    head = (tl.program_id(0) // queries % heads).to(tl.int64)
    batch = (tl.program_id(0) // queries // heads).to(tl.int64)
    parts += batch * part_strides[1] + head * part_strides[2] + query * part_strides[3]
    part_lse += batch * part_lse_strides[1] + head * part_lse_strides[2] + query * part_lse_strides[3]
    some = tl.arange(0, PARTS)
    top = tl.full((PARTS,), float("-inf"), tl.float32)
    for first in range(0, splits, PARTS):
        which = (first + some).to(tl.int64)
        top = tl.maximum(top, tl.load(part_lse + which * part_lse_strides[0], mask=which < splits, other=float("-inf")))
    reference = tl.max(top, 0)
    reference = tl.where(reference == float("-inf"), 0.0, reference)

    dims = tl.arange(0, BLOCK_VALUE_DIM)[None, :]
    output = tl.zeros((1, BLOCK_VALUE_DIM), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, splits, PARTS):
        which = (first + some).to(tl.int64)
        of_parts = tl.load(part_lse + which * part_lse_strides[0], mask=which < splits, other=float("-inf"))
        weight = tl.exp2(of_parts - reference)
        # A split that saw nothing has written no output: what is there may be NaN.
        mask = (of_parts > float("-inf"))[:, None] & (dims < VALUE_DIM)
        values = tl.load(parts + which[:, None] * part_strides[0] + dims, mask=mask, other=0.0)
        output += tl.sum(weight[:, None] * values, 0)[None, :]
        total += tl.sum(weight, 0)
    output /= tl.where(total == 0.0, 1.0, total)[:, None]
    total = reference + tl.log2(total)
    if sinks is not None:
        output, total = _with_sink(output, total, tl.load(sinks + head))
    out += batch * out_strides[1] + head * out_strides[2] + query * out_strides[3]
    tl.store(out + dims, output.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
    lse += batch * lse_strides[1] + head * lse_strides[2] + query * lse_strides[3]
    tl.store(lse + tl.arange(0, 1), total * LN_2)
