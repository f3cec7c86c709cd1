"""Tiles of rows of the Hopper forward: which rows one has, and which keys they see."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_shared import ROWS, fields_of


class Work(NamedTuple):
    """One tile."""

    first_row: Any
    """Within the sequence."""
    head: Any
    sequence: Any
    """The batch, or which of the packed sequences."""
    before_q: Any
    """Rows of earlier sequences."""
    len_q: Any
    len_k: Any


class Keys(NamedTuple):
    """Blocks of keys: those from begin to end are seen, those between the middle two by every row, whole.

    In blocks before `whole_begin` keys are hidden on the left only; from `whole_end` on, on either side (`Shape.ends`).
    """

    begin: Any
    whole_begin: Any
    whole_end: Any
    end: Any
    upto: Any
    """The key behind the last that is seen."""


@gluon.jit
def blocks_of(places, span, ROWS: gl.constexpr):
    """Blocks of rows of a head. Packed: `places` begins with their number: see `count_places`."""
    if places is None:
        return gl.cdiv(span.queries, ROWS)
    else:
        return gl.load(places)


@gluon.jit
def work_of(tile, places, span, batches, heads, together, ROWS: gl.constexpr):
    """A tile's rows, and the keys of earlier sequences.

    Tiles go by so many heads `together`, whose K and V stay in the cache; of these, late rows, which see more, first.
    """
    blocks = blocks_of(places, span, ROWS)
    first_head = tile // (blocks * together) * together
    together = gl.minimum(batches * heads - first_head, together)
    number = tile - first_head * blocks
    late = number // together
    any_head = first_head + number - late * together
    sequence = any_head // heads
    head = any_head - sequence * heads
    block = blocks - 1 - late
    before_q = 0
    before_k = 0
    len_q, len_k = span.queries, span.keys
    if places is not None:
        sequence, block, before_q, len_q, before_k, len_k = fields_of(places, block)
    return Work(block * ROWS, head, sequence, before_q, len_q, len_k), before_k


@gluon.jit
def keys_of(work, first, span, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The blocks of keys that the rows from `first` on see; at least one, which may be masked as a whole."""
    last = gl.minimum(first + ROWS, work.len_q) - 1
    shift = work.len_k - work.len_q
    begin = 0
    upto = work.len_k
    whole_begin = 0
    whole_end = work.len_k // COLUMNS
    if span.right is not None:
        upto = gl.minimum(upto, gl.maximum(last + shift + span.right + 1, 0))
        whole_end = gl.minimum(whole_end, gl.maximum(first + shift + span.right + 1, 0) // COLUMNS)
    end = gl.cdiv(upto, COLUMNS)
    if span.left is not None:
        begin = gl.minimum(gl.maximum(first + shift - span.left, 0) // COLUMNS, end)
        whole_begin = gl.cdiv(gl.maximum(last + shift - span.left, 0), COLUMNS)
    return Keys(begin, whole_begin, whole_end, gl.maximum(end, begin + 1), upto)


@gluon.jit
def sides_of(work, first, end, right, left, COLUMNS: gl.constexpr):
    """Of the blocks from `right` to `left`, counted from the `end`: up to where all keys are ahead of all 64 rows from
    `first` on, and from where none is.
    """
    position = first + work.len_k - work.len_q
    future = end - gl.cdiv(gl.maximum(position + ROWS - 1, 0), COLUMNS)
    future = gl.minimum(gl.maximum(future, right), left)
    past = end - gl.maximum(position + 1, 0) // COLUMNS
    return future, gl.minimum(gl.maximum(past, future), left)


@gluon.jit
def within(keys, tile, there):
    """A consumer's keys as part of the tile's; one block of them if its rows are not `there`."""
    end = gl.minimum(keys.end, tile.end)
    begin = gl.minimum(keys.begin, end - 1)
    begin = gl.where(there, begin, end - 1)
    whole_end = gl.minimum(gl.maximum(keys.whole_end, begin), end)
    whole_begin = gl.minimum(gl.maximum(keys.whole_begin, begin), whole_end)
    return Keys(begin, whole_begin, whole_end, end, keys.upto)
