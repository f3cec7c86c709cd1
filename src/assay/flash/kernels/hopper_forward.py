"""Forward on Hopper: warps with roles. Some load, the others compute, and the tensor cores seldom wait.

A tile is 128 or 192 rows of one head. Four warps (the producer) bring K and V by the copy engine (TMA), two or four
stages ahead; two or three warpgroups (the consumers) have 64 rows each. A consumer issues Q·Kᵀ of the next block and
P·V of this one together, and computes the softmax of the first while the second runs (see `over_blocks`). Blocks of
keys come from right to left: the masked ones first. A CTA stays and takes tile after tile, the long ones first: whoever
is free takes the next (an atomic counter), and loads it while the last one is still being finished.

What a row sums, and in which order, depends on its own sequence only: not on the tile it is in.

The arithmetic is that of `forward.attention_forward`; what it cannot do (bias, dropout, FP32, knobs) goes there.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from assay.flash.kernels.gluon_names import copy_in, thread_barrier
from assay.flash.kernels.hopper_alibi import ahead_of, bounded, lean_of, leaning, turned
from assay.flash.kernels.hopper_fragments import halves, log2, narrowed, rescaled, widened
from assay.flash.kernels.hopper_queue import FIELDS, claim, hear, numbers, tell
from assay.flash.kernels.hopper_shared import (
    LN_2,
    LOG2_E,
    ROWS,
    barriers,
    clean,
    packed,
    partial_sums,
    shared,
    stage_of,
    unpacked,
    write,
)
from assay.flash.kernels.hopper_softmax import Rows, softmax
from assay.flash.kernels.hopper_tiles import Work, blocks_of, keys_of, sides_of, within, work_of
from assay.flash.kernels.hopper_turns import named_barrier, pass_turn, take_turn


class Buffers(NamedTuple):
    """Shared memory and the barriers that say when it is full and when it may be written again."""

    q: Any
    out: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    full: Any
    """K of a block and V of the one before: what a consumer multiplies at the same time."""
    empty: Any
    v_raw: Any
    """Packed: V is there, and not yet cleaned."""
    leaning: Any
    """ALiBi that leans: what Q's `lean` is multiplied by."""
    note: Any
    """What the next tile is, from the producer to the consumers."""
    note_full: Any
    note_empty: Any


class State(NamedTuple):
    """What goes from block to block."""

    p: Any
    """Of the block before: it waits for its product with V."""
    output: Any
    maximum: Any
    row_sum: Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the work, at compile time."""

    consumers: int
    columns: int
    """Keys of a block."""
    value_dim: int
    block_value_dim: int
    q_in_registers: bool
    out_columns: int
    """Of the output, so many leave at a time."""
    turns: bool
    """Whether the consumers take turns at the tensor cores: two are faster without."""
    stages: int
    """Of K and V."""
    ends: str
    """The mask of a row's last blocks: "all", or "right" if none of them can begin before its window."""
    around: bool
    """ALiBi that leans, also over keys ahead of their query."""

    @property
    def q_stages(self) -> int:
        """Tiles of Q a consumer has.

        Two where Q stays in shared memory and the next tile's should come meanwhile. Q in registers frees its place at
        once; large heads leave no room for two.
        """
        return 2 if self.consumers == 3 else 1

    @property
    def registers(self) -> int:
        """Of a consumer's thread: less where three share the register file."""
        return 160 if self.consumers == 3 else 240


@gluon.jit
def bring(
    k_tiles, v_tiles, buffers, work, before_k, batch, kv_head, block, step, cleaned,
    K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """K of a block of keys and V of the block before, on its right, into the stage that was left longest ago."""
    STAGES: gl.constexpr = buffers.k.shape[0]
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    stage, phase = stage_of(step, STAGES)
    full, v = buffers.full.index(stage), buffers.v.index(stage)
    start = (block + 1) * COLUMNS
    place = [batch, kv_head, before_k + start, 0]
    mbarrier.wait(buffers.empty.index(stage), phase ^ 1)
    if not V:
        mbarrier.expect(full, k_tiles.block_type.nbytes)
    elif PACKED and start + COLUMNS > work.len_k:
        mbarrier.expect(buffers.v_raw, v_tiles.block_type.nbytes)
        copy_in(v_tiles, place, buffers.v_raw, v)
        mbarrier.wait(buffers.v_raw, cleaned & 1)
        clean(v, work.len_k - start)
        if K:
            mbarrier.expect(full, k_tiles.block_type.nbytes)
        else:
            mbarrier.arrive(full, count=1)
        cleaned += 1
    else:
        if K:
            mbarrier.expect(full, k_tiles.block_type.nbytes + v_tiles.block_type.nbytes)
        else:
            mbarrier.expect(full, v_tiles.block_type.nbytes)
        copy_in(v_tiles, place, full, v)
    if K:
        place = [batch, kv_head, before_k + start - COLUMNS, 0]
        copy_in(k_tiles, place, full, buffers.k.index(stage))
    return cleaned


@gluon.jit
def produce(given, SHAPE: gl.constexpr):
    """Tile after tile: Q, then K and V block by block."""
    q_tiles, k_tiles, v_tiles, counter, buffers, places, span, batches, heads, group, together = given
    PACKED: gl.constexpr = places is not None
    COLUMNS: gl.constexpr = SHAPE.columns
    CONSUMERS: gl.constexpr = SHAPE.consumers
    TILE: gl.constexpr = ROWS * SHAPE.consumers
    tiles = blocks_of(places, span, TILE) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    cleaned = 0
    while tile < tiles:
        work, before_k = work_of(tile, places, span, batches, heads, together, TILE)
        tell(buffers.note, buffers.note_full, buffers.note_empty, count, work, PACKED)
        batch = gl.to_tensor(0) if PACKED else work.sequence
        for consumer in gl.static_range(CONSUMERS):
            slot = (count % SHAPE.q_stages) * CONSUMERS + consumer
            mbarrier.wait(buffers.q_empty.index(slot), ((count // SHAPE.q_stages) & 1) ^ 1)
            mbarrier.expect(buffers.q_full.index(slot), q_tiles.block_type.nbytes)
            place = [batch, work.head, work.before_q + work.first_row + consumer * ROWS, 0]
            copy_in(q_tiles, place, buffers.q_full.index(slot), buffers.q.index(slot))
        keys = keys_of(work, work.first_row, span, TILE, COLUMNS)
        to = k_tiles, v_tiles, buffers, work, before_k, batch, work.head // group
        last = keys.end - keys.begin
        cleaned = bring(*to, keys.end - 1, step, cleaned, True, False, PACKED)
        for back in range(1, last):
            cleaned = bring(*to, keys.end - 1 - back, step + back, cleaned, True, True, PACKED)
        # With a block to go: claimed earlier, a tile may wait here while another CTA is free; later, this one waits.
        tile = claim(counter, tiles)
        cleaned = bring(*to, keys.begin - 1, step + last, cleaned, False, True, PACKED)
        step += last + 1
        count += 1
    tell(buffers.note, buffers.note_full, buffers.note_empty, count, Work(-1, 0, 0, 0, 0, 0), PACKED)


@gluon.jit
def multiplied(q, lean, buffers, stage, LAYOUT: gl.constexpr):
    """Q·Kᵀ, in flight. With ALiBi that leans, a key's bias within its block is the last step of the same sum."""
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    s = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    if lean is not None:
        s = warpgroup_mma(lean, buffers.leaning.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def half_block(
    s, maximum, row_sum, start, own, ahead, work, span, scores,
    SIDE: gl.constexpr, MASK: gl.constexpr, AROUND: gl.constexpr,
):  # fmt: skip
    """`softmax` of a block of which one half is seen at most, 0 the left one; the other half's exponentials are 0."""
    WIDTH: gl.constexpr = s.shape[1] // 2
    LAYOUT: gl.constexpr = s.type.layout
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    half = narrowed(s, SIDE, S_LAYOUT)
    rows = own.first + gl.arange(0, ROWS, ROW_LAYOUT)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, S_LAYOUT))
    exps, latest, sums, factor = softmax(
        half, gl.convert_layout(maximum, ROW_LAYOUT), gl.convert_layout(row_sum, partial_sums(half).type.layout),
        start + SIDE * WIDTH, Rows(own.first, rows, columns, own.slope, None), ahead, work, span, scores,
        MASK, AROUND, False,
    )  # fmt: skip
    latest = gl.convert_layout(latest, maximum.type.layout)
    sums = gl.convert_layout(sums, row_sum.type.layout)
    factor = gl.convert_layout(factor, maximum.type.layout)
    return widened(exps, SIDE, LAYOUT), latest, sums, factor


@gluon.jit
def over_blocks(
    first, last, earlier, q, state, own, buffers, work, end, span, scores,
    consumer: gl.constexpr, MASK: gl.constexpr, KEYS: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last`, counted from the right, the `end`; `earlier` is how many the CTA had before these rows.

    KEYS, where ALiBi leans: "past" or "future" ones only, or "any".
    On entry P of the block before waits for its product with V; on exit that of the last. A tile of n blocks takes
    n + 1 steps, and the K and V of one come in one stage:

        step    0    1    2   …   n
        K       0    1    2   …   –         block 0 is the rightmost
        V       –    0    1   …   n − 1

    At step i: issue S(i) = Q·K(i)ᵀ and O += P(i−1)·V(i−1); wait for S(i); its softmax, P(i) and the factor, while P·V
    runs; wait for O; free the stage; O ← O · factor.
    """
    COLUMNS: gl.constexpr = SHAPE.columns
    STAGES: gl.constexpr = SHAPE.stages
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, state.output.type.layout, 2)
    # Of two consumers, only large ALiBi's: else ptxas (12.8) moves the wait for P·V in front of the maximum.
    THREES: gl.constexpr = MASK is None and (SHAPE.consumers == 3 or (SHAPE.around and SHAPE.block_value_dim > 128))
    AROUND: gl.constexpr = SHAPE.around and KEYS == "any"
    if KEYS == "future":
        tilt = own.slope * (own.numbers - own.first).to(gl.float32)
    for back in range(first, last):
        step = earlier + back
        stage, phase = stage_of(step, STAGES)
        p, output, maximum, row_sum = state
        cast = unpacked(p, buffers.v.dtype, P_LAYOUT)
        mbarrier.wait(buffers.full.index(stage), phase)
        take_turn(consumer, SHAPE)
        s = multiplied(q, own.lean, buffers, stage, S_LAYOUT)
        if SHAPE.consumers == 3:
            # It is full, and this waits for nothing; but without it ALiBi takes 3 to 5% more from N 4096 on.
            mbarrier.wait(buffers.full.index(stage), phase)
        output = warpgroup_mma(cast, buffers.v.index(stage), output, is_async=True)
        pass_turn(consumer, SHAPE)
        s = warpgroup_mma_wait(1, deps=(s,))
        start = (end - 1 - back) * COLUMNS
        ahead = ahead_of(start, own.first, own.slope, work, COLUMNS)
        if KEYS == "future":
            ahead = 2.0 * tilt - ahead
        block = s, maximum, row_sum, start, own, ahead, work, span, scores
        if MASK == "left" and COLUMNS == 128:
            if own.first + work.len_k - work.len_q - span.left - start >= COLUMNS // 2:
                exps, maximum, row_sum, factor = half_block(*block, 1, MASK, AROUND)
            else:
                exps, maximum, row_sum, factor = softmax(*block, MASK, AROUND, THREES)
        else:
            exps, maximum, row_sum, factor = softmax(*block, MASK, AROUND, THREES)
        output = warpgroup_mma_wait(0, deps=(output,))
        mbarrier.arrive(buffers.empty.index(stage), count=1)
        if SHAPE.block_value_dim > 128:  # worth a look whether any factor is not 1
            output = rescaled(output, factor)
        else:
            output = output * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, output.type.layout)), 1)
        state = State(packed(gl.convert_layout(exps, P_LAYOUT), buffers.v.dtype), output, maximum, row_sum)
    return state


@gluon.jit
def pass_blocks(first, last, buffers, consumer: gl.constexpr, SHAPE: gl.constexpr):
    """Steps whose keys only other consumers' rows see."""
    STAGES: gl.constexpr = SHAPE.stages
    for step in range(first, last):
        stage, phase = stage_of(step, STAGES)
        mbarrier.wait(buffers.full.index(stage), phase)
        take_turn(consumer, SHAPE)
        pass_turn(consumer, SHAPE)
        mbarrier.arrive(buffers.empty.index(stage), count=1)


@gluon.jit
def consume(given, consumer: gl.constexpr, SHAPE: gl.constexpr):
    """Its 64 rows of tile after tile."""
    out_tiles, out, out_strides, lse, sinks, places, span, scores, heads, buffers = given
    PACKED: gl.constexpr = places is not None
    if SHAPE.turns and consumer == SHAPE.consumers - 1:  # the first turn is consumer 0's
        named_barrier("arrive", 0)
    count = 0
    step = 0
    work = hear(buffers.note, buffers.note_full, buffers.note_empty, count, span, PACKED)
    while work.first_row >= 0:
        keys = keys_of(work, work.first_row, span, ROWS * SHAPE.consumers, SHAPE.columns)
        attend(out_tiles, out, out_strides, lse, sinks, span, scores, heads, buffers, work, keys, count, step,
               consumer, PACKED, SHAPE)  # fmt: skip
        step += keys.end - keys.begin + 1
        count += 1
        work = hear(buffers.note, buffers.note_full, buffers.note_empty, count, span, PACKED)
    tma.store_wait(0)
    if SHAPE.turns and consumer == 0:  # the last turn, which nobody takes
        named_barrier("sync", 0)


@gluon.jit
def attend(
    out_tiles, out, out_strides, lse, sinks, span, scores, heads, buffers, work, tile, count, earlier,
    consumer: gl.constexpr, PACKED: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """64 rows over their blocks of keys; `tile` has those of all rows, `earlier` is how many came before it."""
    COLUMNS: gl.constexpr = SHAPE.columns
    STAGES: gl.constexpr = SHAPE.stages
    VALUES: gl.constexpr = SHAPE.block_value_dim
    ENDS: gl.constexpr = SHAPE.ends
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    first = work.first_row + consumer * ROWS
    keys = within(keys_of(work, first, span, ROWS, COLUMNS), tile, first < work.len_q)
    rows = first + gl.arange(0, ROWS, ROW_LAYOUT)
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, S_LAYOUT))
    slope = 0.0
    if scores.slopes is not None:
        slope = gl.load(scores.slopes + work.sequence * heads + work.head) * LOG2_E
    lean = None
    if scores.near is not None:
        slope = bounded(slope, scores)
        lean = lean_of(slope, scores, buffers.k.dtype, gl.DotOperandLayout(0, S_LAYOUT, 2))
    maximum = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    row_sum = partial_sums(gl.zeros([ROWS, COLUMNS], gl.float32, S_LAYOUT))
    tilt = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
    if scores.near is not None:
        tilt = slope * (rows - first).to(gl.float32)
    if sinks is not None:  # one more key, which has no value
        maximum = tilt + gl.load(sinks + work.head).to(gl.float32) * LOG2_E
        row_sum += 0.25  # 1, as four threads' partial sums
    output = gl.zeros([ROWS, VALUES], gl.float32, O_LAYOUT)
    own = Rows(first, rows, columns, slope, lean)

    q_slot = (count % SHAPE.q_stages) * SHAPE.consumers + consumer
    mbarrier.wait(buffers.q_full.index(q_slot), (count // SHAPE.q_stages) & 1)
    q = buffers.q.index(q_slot)
    if SHAPE.q_in_registers:
        q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(buffers.q_empty.index(q_slot), count=1)
    others = tile.end - keys.end
    pass_blocks(earlier, earlier + others, buffers, consumer, SHAPE)
    step = earlier + others
    stage, phase = stage_of(step, STAGES)
    mbarrier.wait(buffers.full.index(stage), phase)
    start = (keys.end - 1) * COLUMNS
    # Before the branches: the assembler (ptxas 12.8) loses descriptors of products that stand in both.
    take_turn(consumer, SHAPE)
    s = multiplied(q, lean, buffers, stage, S_LAYOUT)
    pass_turn(consumer, SHAPE)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(buffers.empty.index(stage), count=1)
    ahead = ahead_of(start, first, slope, work, COLUMNS)
    block = s, maximum, row_sum, start, own, ahead, work, span, scores
    if span.right is None and span.left is None:
        if keys.whole_end == keys.end:
            exps, maximum, row_sum, _ = softmax(*block, None, SHAPE.around, False)
        else:
            exps, maximum, row_sum, _ = softmax(*block, ENDS, SHAPE.around, False)
    elif COLUMNS == 128:
        if keys.upto - start <= COLUMNS // 2:
            exps, maximum, row_sum, _ = half_block(*block, 0, ENDS, SHAPE.around)
        else:
            exps, maximum, row_sum, _ = softmax(*block, ENDS, SHAPE.around, False)
    else:
        exps, maximum, row_sum, _ = softmax(*block, ENDS, SHAPE.around, False)
    state = State(packed(gl.convert_layout(exps, P_LAYOUT), buffers.v.dtype), output, maximum, row_sum)
    right = gl.maximum(keys.end - keys.whole_end, 1)
    left = gl.maximum(keys.end - keys.whole_begin, right)
    rest = own, buffers, work, keys.end, span, scores
    state = over_blocks(1, right, step, q, state, *rest, consumer, ENDS, "any", SHAPE)
    if SHAPE.around:
        future, past = sides_of(work, first, keys.end, right, left, COLUMNS)
        own = Rows(first, rows, columns, slope, turned(lean))
        rest = own, buffers, work, keys.end, span, scores
        state = over_blocks(right, future, step, q, state, *rest, consumer, None, "future", SHAPE)
        own = Rows(first, rows, columns, slope, turned(own.lean))
        rest = own, buffers, work, keys.end, span, scores
        state = over_blocks(future, past, step, q, state, *rest, consumer, None, "any", SHAPE)
        right = past
    state = over_blocks(right, left, step, q, state, *rest, consumer, None, "past", SHAPE)
    if span.left is not None:
        state = over_blocks(left, keys.end - keys.begin, step, q, state, *rest, consumer, "left", "any", SHAPE)
    if not SHAPE.q_in_registers:
        mbarrier.arrive(buffers.q_empty.index(q_slot), count=1)
    step += keys.end - keys.begin
    stage, phase = stage_of(step, STAGES)
    mbarrier.wait(buffers.full.index(stage), phase)
    p = unpacked(state.p, buffers.v.dtype, P_LAYOUT)
    output = warpgroup_mma(p, buffers.v.index(stage), state.output, is_async=True)
    output = warpgroup_mma_wait(0, deps=(output,))
    mbarrier.arrive(buffers.empty.index(stage), count=1)
    pass_blocks(step + 1, step + 1 + keys.begin - tile.begin, buffers, consumer, SHAPE)

    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), ROW_LAYOUT)
    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    output = output * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT)), 1)
    batch = gl.to_tensor(0) if PACKED else work.sequence
    place = (batch * heads + work.head).to(gl.int64) * span.queries + work.before_q
    gl.store(lse + place + rows, (state.maximum + log2(row_sum) - tilt) * LN_2, mask=rows < work.len_q)
    rows_at = batch, work.head, work.before_q, first, work.len_q
    buffer = buffers.out.index(consumer)
    if SHAPE.out_columns == VALUES:
        write(out_tiles, out, out_strides, output, rows_at, buffer, PACKED, SHAPE.value_dim)
    else:
        lower, upper = halves(output)
        write(out_tiles, out, out_strides, lower, rows_at, buffer, PACKED, SHAPE.value_dim)
        write(out_tiles, out, out_strides, upper, rows_at, buffer, PACKED, SHAPE.value_dim, SHAPE.out_columns)


@gluon.jit(do_not_specialize=["batches", "heads", "group", "together"])
def attention_forward_hopper(
    q_tiles, k_tiles, v_tiles, out_tiles, out, out_strides, lse, sinks, counter, places, span, scores, batches, heads,
    group, together, BLOCK_DIM: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as run at once. `counter` is 0 before and after; `places` is None, or see `blocks_of`; for
    `together` see `work_of`.
    """
    dtype: gl.constexpr = q_tiles.dtype
    CONSUMERS: gl.constexpr = SHAPE.consumers
    STAGES: gl.constexpr = SHAPE.stages
    Q_TILES: gl.constexpr = CONSUMERS * SHAPE.q_stages
    buffers = Buffers(
        q=shared(dtype, Q_TILES, ROWS, BLOCK_DIM),
        out=shared(dtype, CONSUMERS, ROWS, SHAPE.out_columns),
        k=shared(dtype, STAGES, SHAPE.columns, BLOCK_DIM),
        v=shared(dtype, STAGES, SHAPE.columns, SHAPE.block_value_dim),
        q_full=barriers(Q_TILES, 1),
        q_empty=barriers(Q_TILES, 1),
        full=barriers(STAGES, 1),
        empty=barriers(STAGES, CONSUMERS),
        v_raw=None if places is None else barriers(1, 1).index(0),
        leaning=None if scores.near is None else leaning(dtype, SHAPE.columns),
        note=numbers(2 * FIELDS),
        note_full=barriers(2, 1),
        note_empty=barriers(2, CONSUMERS),
    )
    fence_async_shared()  # what threads wrote so far, the copy engine and the tensor cores may see
    loads = q_tiles, k_tiles, v_tiles, counter, buffers, places, span, batches, heads, group, together
    rest = out_tiles, out, out_strides, lse, sinks, places, span, scores, heads, buffers
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(produce, (loads, SHAPE)), (consume, (rest, 0, SHAPE)), (consume, (rest, 1, SHAPE))],
            [4, 4],
            [SHAPE.registers, SHAPE.registers],
        )
    else:
        gl.warp_specialize(
            [
                (produce, (loads, SHAPE)),
                (consume, (rest, 0, SHAPE)),
                (consume, (rest, 1, SHAPE)),
                (consume, (rest, 2, SHAPE)),
            ],
            [4, 4, 4],
            [SHAPE.registers, SHAPE.registers, SHAPE.registers],
        )
