"""Which tile a CTA takes next: its producer claims it, and tells the consumers. Two may be on their way.

`count` is how many the producer told, or a consumer heard of, before.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from assay.flash.kernels.gluon_names import thread_barrier
from assay.flash.kernels.hopper_tiles import Work

FIELDS = gl.constexpr(6)  # of a `Work`
SCALAR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def claim(counter, tiles):
    """The next tile that nobody has. Each tile is followed by one claim: the last leaves the counter at 0."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")  # orders nothing: a fence takes longer than the claim
    if taken == tiles - 1:
        gl.store(counter, 0)
    return taken + gl.num_programs(0)


@gluon.jit
def claim_tile(counter, buffers, count):
    """The next tile that nobody has, told to the consumers."""
    tile = gl.atomic_add(counter, 1) + gl.num_programs(0)
    tell_tile(tile, buffers, count)
    return tile


@gluon.jit
def tell_tile(tile, buffers, count):
    """The producer's next tile, a number."""
    slot = count & 1
    mbarrier.wait(buffers.next_empty.index(slot), ((count >> 1) & 1) ^ 1)
    buffers.next.index(slot).store(gl.full([1], 0, gl.int32, SCALAR) + tile)
    thread_barrier()  # all threads write it, one tells the consumers
    mbarrier.arrive(buffers.next_full.index(slot), count=1)


@gluon.jit
def next_tile(buffers, count):
    """What the producer told, at a consumer."""
    slot = count & 1
    mbarrier.wait(buffers.next_full.index(slot), (count >> 1) & 1)
    tile = gl.max(buffers.next.index(slot).load(SCALAR), 0)
    thread_barrier()  # one thread tells the producer, and all have read
    mbarrier.arrive(buffers.next_empty.index(slot), count=1)
    return tile


@gluon.jit
def tell(note, full, empty, count, work, PACKED: gl.constexpr):
    """The producer's next tile, as `Work`; a first row of −1 says that there is none."""
    slot = count & 1
    mbarrier.wait(empty.index(slot), ((count >> 1) & 1) ^ 1)
    put(note, slot * FIELDS, work.first_row)
    put(note, slot * FIELDS + 1, work.head)
    put(note, slot * FIELDS + 2, work.sequence)
    if PACKED:
        put(note, slot * FIELDS + 3, work.before_q)
        put(note, slot * FIELDS + 4, work.len_q)
        put(note, slot * FIELDS + 5, work.len_k)
    thread_barrier()  # all threads write it, one tells the consumers
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def hear(note, full, empty, count, span, PACKED: gl.constexpr):
    """What the producer told, at a consumer."""
    slot = count & 1
    mbarrier.wait(full.index(slot), (count >> 1) & 1)
    first_row, head, sequence = get(note, slot * FIELDS), get(note, slot * FIELDS + 1), get(note, slot * FIELDS + 2)
    before_q = 0
    len_q, len_k = span.queries, span.keys
    if PACKED:
        before_q = get(note, slot * FIELDS + 3)
        len_q, len_k = get(note, slot * FIELDS + 4), get(note, slot * FIELDS + 5)
    thread_barrier()  # one thread tells the producer, and all have read
    mbarrier.arrive(empty.index(slot), count=1)
    return Work(first_row, head, sequence, before_q, len_q, len_k)


@gluon.jit
def numbers(count: gl.constexpr):
    """Room for so many."""
    return gl.allocate_shared_memory(gl.int32, [count, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def put(room, place, value):
    """One number, by all threads."""
    room.index(place).store(gl.full([1], 0, gl.int32, SCALAR) + value)


@gluon.jit
def get(room, place):
    """One number, to all threads."""
    return gl.max(room.index(place).load(SCALAR), 0)
