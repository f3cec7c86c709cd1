"""Tiles of rows on Hopper, for dQ and for FP8: 128 or 192 rows of one head, and the blocks of keys that they see."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_shared import fields_of


class Work(NamedTuple):
    """One tile."""

    batch: Any
    head: Any
    kv_head: Any
    sequence: Any
    """The batch, or which of the packed sequences."""
    before_q: Any
    """Rows of earlier sequences."""
    before_k: Any
    first_row: Any
    """Within the sequence, as all that follow."""
    len_q: Any
    len_k: Any
    begin: Any
    """Blocks of keys: those from begin to end are seen, those between the middle two by every row, whole."""
    whole_begin: Any
    whole_end: Any
    end: Any


@gluon.jit
def blocks_of(places, span, TILE: gl.constexpr):
    """Blocks of rows of a head. Packed: `places` begins with their number: see `count_places`."""
    if places is None:
        return gl.cdiv(span.queries, TILE)
    else:
        return gl.load(places)


@gluon.jit
def work_of(
    tile, places, span, batches, heads, group, TILE: gl.constexpr, COLUMNS: gl.constexpr, TOGETHER: gl.constexpr = 4
):  # fmt: skip
    """A tile's rows, and which blocks of keys they see.

    Tiles go by TOGETHER heads, whose K and V stay in the cache; of these, those of late rows, which see more, go first.
    """
    blocks = blocks_of(places, span, TILE)
    first_head = tile // (blocks * TOGETHER) * TOGETHER
    together = gl.minimum(batches * heads - first_head, TOGETHER)
    number = tile - first_head * blocks
    any_head = first_head + number % together
    batch, head = any_head // heads, any_head % heads
    block = blocks - 1 - number // together
    sequence = batch
    before_q = 0
    before_k = 0
    len_q, len_k = span.queries, span.keys
    if places is not None:
        sequence, block, before_q, len_q, before_k, len_k = fields_of(places, block)
    first = block * TILE
    last = gl.minimum(first + TILE, len_q) - 1
    shift = len_k - len_q
    begin = 0
    end = gl.cdiv(len_k, COLUMNS)
    whole_begin = 0
    whole_end = len_k // COLUMNS
    if span.right is not None:
        end = gl.minimum(end, gl.cdiv(gl.maximum(last + shift + span.right + 1, 0), COLUMNS))
        whole_end = gl.minimum(whole_end, gl.maximum(first + shift + span.right + 1, 0) // COLUMNS)
    if span.left is not None:
        begin = gl.minimum(gl.maximum(first + shift - span.left, 0) // COLUMNS, end)
        whole_begin = gl.cdiv(gl.maximum(last + shift - span.left, 0), COLUMNS)
    end = gl.maximum(end, begin + 1)  # rows that see nothing go over one block, all of it masked
    whole_begin = gl.minimum(gl.maximum(whole_begin, begin), end)
    whole_end = gl.minimum(gl.maximum(whole_end, whole_begin), end)
    return Work(
        batch, head, head // group, sequence, before_q, before_k, first, len_q, len_k,
        begin, whole_begin, whole_end, end,
    )  # fmt: skip


@gluon.jit
def seen(rows, keys, work, span):
    """(rows, keys): whether a row sees a key."""
    keys = gl.expand_dims(keys, 0)
    position = gl.expand_dims(rows + (work.len_k - work.len_q), 1)
    visible = keys < work.len_k
    if span.right is not None:
        visible &= keys <= position + span.right
    if span.left is not None:
        visible &= keys >= position - span.left
    return visible
