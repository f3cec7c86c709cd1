"""Where the tiles of packed sequences lie: counted on the GPU, since the lengths are there."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sequences", "most"])
def count_places(cu, places, sequences, most, size, TILES: tl.constexpr, SEQUENCES: tl.constexpr):
    """How many tiles of `size` rows there are, then each one's sequence and its number there. Grid: so many TILES each.

    Sequences begin at `cu`. Those that end at or before a tile are counted: their number is its sequence. There is room
    for `most` tiles; what stands behind the last one means nothing.
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
    tl.store(places + 1 + 2 * tiles, tl.minimum(sequence, sequences - 1), tiles < most)
    tl.store(places + 2 + 2 * tiles, tiles - before, tiles < most)
