"""Where the tiles of packed sequences lie: counted on the GPU, since the lengths are there."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(6)
"""Of a tile: its sequence, its number there, the queries before that sequence and in it, the keys before and in it."""


@triton.jit(do_not_specialize=["sequences", "most"])
def count_places(cu, cu_q, cu_k, places, sequences, most, size, TILES: tl.constexpr, SEQUENCES: tl.constexpr):
    """How many tiles of `size` rows there are, then each one's fields. Grid: so many TILES each.

    Sequences begin at `cu`, which is `cu_q` or `cu_k`. Those that end at or before a tile are counted: their number is
    its sequence. There is room for `most` tiles; what stands behind the last one means nothing.
    """
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    sequence = tl.zeros([TILES], tl.int32)
    before = tl.zeros([TILES], tl.int32)
    total = 0
    for first in range(0, sequences, SEQUENCES):
        numbers = first + tl.arange(0, SEQUENCES)
        there = numbers < sequences
        length = tl.load(cu + numbers + 1, there, other=0) - tl.load(cu + numbers, there, other=0)
        ends = total + tl.cumsum(tl.cdiv(length, size), 0)
        passed = (ends[None, :] <= tiles[:, None]) & there[None, :]
        sequence += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        total = tl.max(ends, 0)
    tl.store(places, total)  # by every program the same
    sequence = tl.minimum(sequence, sequences - 1)
    place = places + 1 + FIELDS * tiles
    inside = tiles < most
    tl.store(place, sequence, inside)
    tl.store(place + 1, tiles - before, inside)
    first_query, first_key = tl.load(cu_q + sequence), tl.load(cu_k + sequence)
    tl.store(place + 2, first_query, inside)
    tl.store(place + 3, tl.load(cu_q + sequence + 1) - first_query, inside)
    tl.store(place + 4, first_key, inside)
    tl.store(place + 5, tl.load(cu_k + sequence + 1) - first_key, inside)
