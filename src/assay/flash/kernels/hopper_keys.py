"""Tiles of keys on Hopper, for dK and dV: some keys of one head of K and V, and the blocks of rows that see them."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_shared import fields_of, line_of


class Work(NamedTuple):
    """One tile."""

    batch: Any
    kv_head: Any
    sequence: Any
    """The batch, or which of the packed sequences."""
    before_q: Any
    """Rows of earlier sequences."""
    before_k: Any
    first_key: Any
    """Within the sequence, as all that follow."""
    len_q: Any
    len_k: Any
    line: Any
    """Where the sequence's rows begin in the lines of LSE, delta and dQ."""
    begin: Any
    """Blocks of rows: those from begin to end see some of the keys, those between the middle two all."""
    whole_begin: Any
    whole_end: Any
    end: Any


@gluon.jit
def first_block(work, KEYS: gl.constexpr, APART: gl.constexpr):
    """Of rows, where a tile begins; APART: each at another, so that not all add to the same dQ at the same time."""
    first = work.begin
    if APART:
        first += work.first_key // KEYS % (work.end - work.begin)
    return first


@gluon.jit
def blocks_of(places, span, KEYS: gl.constexpr):
    """Blocks of keys of a head. Packed: `places` begins with their number: see `count_places`."""
    if places is None:
        return gl.cdiv(span.keys, KEYS)
    else:
        return gl.load(places)


@gluon.jit
def work_of(tile, places, span, batches, kv_heads, together, KEYS: gl.constexpr, ROWS: gl.constexpr):
    """A tile's keys, and which blocks of rows see them.

    Tiles go by so many heads `together`, whose Q and dO stay in the cache; of these, early keys, which more rows see,
    first. Rows beyond the last need no mask, since their LSE is +∞. A packed tile beyond the last has keys
    beyond the last: nothing is kept of them.
    """
    blocks = blocks_of(places, span, KEYS)
    beyond = tile >= blocks * batches * kv_heads
    tile = gl.minimum(tile, blocks * batches * kv_heads - 1)
    first_head = tile // (blocks * together) * together
    together = gl.minimum(batches * kv_heads - first_head, together)
    number = tile - first_head * blocks
    any_head = first_head + number % together
    batch, kv_head = any_head // kv_heads, any_head % kv_heads
    block = number // together
    sequence = batch
    before_q = 0
    before_k = 0
    line = 0
    len_q, len_k = span.queries, span.keys
    if places is not None:
        sequence, block, before_q, len_q, before_k, len_k = fields_of(places, block)
        line = line_of(before_q, sequence)
    first = block * KEYS
    if places is not None:
        first = gl.where(beyond, gl.cdiv(len_k, KEYS) * KEYS, first)
    last = gl.minimum(first + KEYS, len_k) - 1
    shift = len_k - len_q
    begin = 0
    whole_begin = 0
    end = gl.cdiv(len_q, ROWS)
    whole_end = end
    if span.right is not None:
        begin = gl.maximum(first - shift - span.right, 0) // ROWS
        whole_begin = gl.cdiv(gl.maximum(last - shift - span.right, 0), ROWS)
    if span.left is not None:
        end = gl.minimum(end, gl.cdiv(gl.maximum(last - shift + span.left + 1, 0), ROWS))
        whole_end = gl.minimum(whole_end, gl.maximum(first - shift + span.left + 1, 0) // ROWS)
    if places is not None:
        end = gl.where(beyond, 0, end)
    begin = gl.minimum(begin, gl.maximum(end - 1, 0))
    end = gl.maximum(end, begin + 1)  # keys that nobody sees meet one block, all of it masked
    return Work(
        batch, kv_head, sequence, before_q, before_k, first, len_q, len_k, line, begin, whole_begin, whole_end, end
    )  # fmt: skip
