"""Forward on Hopper: warps with roles. One loads, two compute, and the tensor cores never wait for the softmax.

A tile is 128 rows of one head. Four warps (the producer) bring K and V by the copy engine (TMA), two stages ahead; two
warpgroups (the consumers) have 64 rows each. A consumer issues Q·Kᵀ of the next block and P·V of this one together, and
computes the softmax of the first while the second runs. Blocks of keys come from right to left: the masked ones first.
A CTA stays and takes tile after tile, the long ones first: whoever is free takes the next (an atomic counter), and its
loads begin while the last tile is still being finished.

The arithmetic is that of `forward.attention_forward`; what it cannot do (bias, dropout, FP32, knobs) goes there.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

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

from assay.flash.kernels.hopper_shared import (
    LN_2,
    LOG2_E,
    ROWS,
    barriers,
    claim_tile,
    clean,
    next_tile,
    packed,
    shared,
    tanh,
    unpacked,
    write,
)

CONSUMERS = gl.constexpr(2)
STAGES = gl.constexpr(2)
TOGETHER = gl.constexpr(4)  # heads


class Buffers(NamedTuple):
    """Shared memory and the barriers that say when it is full and when it may be written again."""

    q: Any
    out: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    v_raw: Any
    """Packed: V is there, and not yet cleaned."""
    next: Any
    """The number of the next tile, from the producer to the consumers."""
    next_full: Any
    next_empty: Any


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
def blocks_of(places, span):
    """Blocks of rows of a head. Packed: `places` holds their number, then each one's sequence and number there."""
    if places is None:
        return gl.cdiv(span.queries, ROWS * CONSUMERS)
    else:
        return gl.load(places)


@gluon.jit
def work_of(tile, places, span, batches, heads, group, COLUMNS: gl.constexpr):
    """A tile's rows, and which blocks of keys they see.

    Tiles go by four heads, whose K and V stay in the cache; of these, those of late rows, which see more, go first.
    """
    blocks = blocks_of(places, span)
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
        sequence = gl.load(places + 1 + 2 * block)
        block = gl.load(places + 2 + 2 * block)
        before_q, before_k = gl.load(span.cu_q + sequence), gl.load(span.cu_k + sequence)
        len_q, len_k = gl.load(span.cu_q + sequence + 1) - before_q, gl.load(span.cu_k + sequence + 1) - before_k
    first = block * (ROWS * CONSUMERS)
    last = gl.minimum(first + ROWS * CONSUMERS, len_q) - 1
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
def produce(
    q_tiles, k_tiles, v_tiles, counter, buffers, places, span, batches, heads, group,
    COLUMNS: gl.constexpr, BLOCK_VALUE_DIM: gl.constexpr,
):  # fmt: skip
    """Tile after tile: Q, then K and V block by block, each into the stage that the consumers left longest ago."""
    tiles = blocks_of(places, span) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    cleaned = 0
    while tile < tiles:
        work = work_of(tile, places, span, batches, heads, group, COLUMNS)
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(buffers.q_empty.index(consumer), (count & 1) ^ 1)
            mbarrier.expect(buffers.q_full.index(consumer), q_tiles.block_type.nbytes)
            place = [work.batch, work.head, work.before_q + work.first_row + consumer * ROWS, 0]
            tma.async_copy_global_to_shared(q_tiles, place, buffers.q_full.index(consumer), buffers.q.index(consumer))
        for back in range(work.end - work.begin):
            start = (work.end - 1 - back) * COLUMNS
            place = [work.batch, work.kv_head, work.before_k + start, 0]
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(buffers.k_empty.index(stage), phase)
            mbarrier.expect(buffers.k_full.index(stage), k_tiles.block_type.nbytes)
            tma.async_copy_global_to_shared(k_tiles, place, buffers.k_full.index(stage), buffers.k.index(stage))
            mbarrier.wait(buffers.v_empty.index(stage), phase)
            v = buffers.v.index(stage)
            if places is not None and start + COLUMNS > work.len_k:
                mbarrier.expect(buffers.v_raw, v_tiles.block_type.nbytes)
                tma.async_copy_global_to_shared(v_tiles, place, buffers.v_raw, v)
                mbarrier.wait(buffers.v_raw, cleaned & 1)
                clean(v, work.len_k - start)
                mbarrier.arrive(buffers.v_full.index(stage), count=1)
                cleaned += 1
            else:
                mbarrier.expect(buffers.v_full.index(stage), v_tiles.block_type.nbytes)
                tma.async_copy_global_to_shared(v_tiles, place, buffers.v_full.index(stage), v)
            step += 1
        tile = claim_tile(counter, buffers, count)  # only now: claimed early it may wait here while another CTA is free
        count += 1


@gluon.jit
def softmax(s, maximum, row_sum, start, rows, columns, slope, leaning, work, span, scores, MASKED: gl.constexpr):
    """One block's scores → P, the new maximum and row sum, and the factor for what came before.

    With `scores.near` the block's keys are `leaning`, and all are counted from the tile's first position: what that
    adds to a row's scores `attend` takes off its LSE.
    """
    LINEAR: gl.constexpr = scores.slopes is None or scores.near is not None
    keys = gl.expand_dims(start + columns, 0)
    position = gl.expand_dims(rows + (work.len_k - work.len_q), 1)
    unit = scores.scale
    if scores.cap is not None:
        s = tanh(s * scores.scale)
        unit = scores.cap
    ahead = 0.0
    if scores.near is not None:
        s += gl.expand_dims(leaning, 0)
        ahead = slope * (start - (work.first_row + work.len_k - work.len_q)).to(gl.float32)
    if not LINEAR:
        s = s * unit - slope * gl.abs(position.to(gl.float32) - keys.to(gl.float32))
    if MASKED:
        seen = keys < work.len_k
        if span.right is not None:
            seen &= keys <= position + span.right
        if span.left is not None:
            seen &= keys >= position - span.left
        s = gl.where(seen, s, float("-inf"))
    if LINEAR:
        latest = gl.maximum(maximum, gl.max(s, 1) * unit + ahead)
    else:
        latest = gl.maximum(maximum, gl.max(s, 1))
    reference = latest
    if MASKED:
        reference = gl.where(latest == float("-inf"), 0.0, latest)
    if LINEAR:
        p = gl.exp2(s * unit - gl.expand_dims(reference - ahead, 1))
    else:
        p = gl.exp2(s - gl.expand_dims(reference, 1))
    factor = gl.exp2(maximum - reference)
    return p, latest, row_sum * factor + gl.sum(p, 1), factor


@gluon.jit
def over_blocks(
    first, last, earlier, q, p, output, maximum, row_sum, rows, columns, slope, leaning, buffers, work, span, scores,
    COLUMNS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last`, counted from the right; `earlier` is how many came before this tile.

    On entry P of the block before waits for its product with V; on exit that of the last.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, output.type.layout, 2)
    for back in range(first, last):
        step = earlier + back
        before, stage = (step - 1) % STAGES, step % STAGES
        cast = unpacked(p, buffers.v.dtype, P_LAYOUT)
        mbarrier.wait(buffers.k_full.index(stage), (step // STAGES) & 1)
        empty = gl.zeros([ROWS, COLUMNS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.wait(buffers.v_full.index(before), ((step - 1) // STAGES) & 1)
        output = warpgroup_mma(cast, buffers.v.index(before), output, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(buffers.k_empty.index(stage), count=1)
        start = (work.end - 1 - back) * COLUMNS
        exps, maximum, row_sum, factor = softmax(
            s, maximum, row_sum, start, rows, columns, slope, leaning, work, span, scores, MASKED
        )
        output = warpgroup_mma_wait(0, deps=(output,))
        mbarrier.arrive(buffers.v_empty.index(before), count=1)
        output = output * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, output.type.layout)), 1)
        p = packed(gl.convert_layout(exps, P_LAYOUT), buffers.v.dtype)
    return p, output, maximum, row_sum


@gluon.jit
def consume(
    out_tiles, out, out_strides, lse, sinks, places, span, scores, batches, heads, group, buffers,
    consumer: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_VALUE_DIM: gl.constexpr,
    COLUMNS: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, OWN_BUFFER: gl.constexpr,
):  # fmt: skip
    """Its 64 rows of tile after tile."""
    tiles = blocks_of(places, span) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    while tile < tiles:
        work = work_of(tile, places, span, batches, heads, group, COLUMNS)
        attend(
            out_tiles, out, out_strides, lse, sinks, places, span, scores, heads, buffers, work, count, step,
            consumer, VALUE_DIM, BLOCK_VALUE_DIM, COLUMNS, Q_IN_REGISTERS, OWN_BUFFER,
        )  # fmt: skip
        step += work.end - work.begin
        tile = next_tile(buffers, count)
        count += 1
    tma.store_wait(0)


@gluon.jit
def attend(
    out_tiles, out, out_strides, lse, sinks, places, span, scores, heads, buffers, work, count, earlier,
    consumer: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_VALUE_DIM: gl.constexpr,
    COLUMNS: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, OWN_BUFFER: gl.constexpr,
):  # fmt: skip
    """64 rows over all their blocks of keys; `earlier` is how many blocks came before this tile, the count-th."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_VALUE_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    rows = work.first_row + consumer * ROWS + gl.arange(0, ROWS, ROW_LAYOUT)
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, S_LAYOUT))
    slope = 0.0
    if scores.slopes is not None:
        slope = gl.load(scores.slopes + work.sequence * heads + work.head) * LOG2_E
    maximum = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    row_sum = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
    tilt = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
    leaning = slope
    if scores.near is not None:
        tilt = slope * (rows - work.first_row).to(gl.float32)
        leaning = slope / (scores.scale if scores.cap is None else scores.cap) * columns.to(gl.float32)
    if sinks is not None:  # one more key, which has no value
        maximum = tilt + gl.load(sinks + work.head).to(gl.float32) * LOG2_E
        row_sum += 1.0
    output = gl.zeros([ROWS, BLOCK_VALUE_DIM], gl.float32, O_LAYOUT)

    mbarrier.wait(buffers.q_full.index(consumer), count & 1)
    q = buffers.q.index(consumer)
    if Q_IN_REGISTERS:
        q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(buffers.q_empty.index(consumer), count=1)
    stage = earlier % STAGES
    mbarrier.wait(buffers.k_full.index(stage), (earlier // STAGES) & 1)
    empty = gl.zeros([ROWS, COLUMNS], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(buffers.k_empty.index(stage), count=1)
    start = (work.end - 1) * COLUMNS
    exps, maximum, row_sum, _ = softmax(
        s, maximum, row_sum, start, rows, columns, slope, leaning, work, span, scores, True
    )
    p = packed(gl.convert_layout(exps, P_LAYOUT), buffers.v.dtype)
    right = gl.maximum(work.end - work.whole_end, 1)
    left = gl.maximum(work.end - work.whole_begin, right)
    p, output, maximum, row_sum = over_blocks(
        1, right, earlier, q, p, output, maximum, row_sum, rows, columns, slope, leaning, buffers, work, span, scores,
        COLUMNS, True,
    )  # fmt: skip
    p, output, maximum, row_sum = over_blocks(
        right, left, earlier, q, p, output, maximum, row_sum, rows, columns, slope, leaning, buffers, work, span,
        scores, COLUMNS, False,
    )  # fmt: skip
    if span.left is not None:
        p, output, maximum, row_sum = over_blocks(
            left, work.end - work.begin, earlier, q, p, output, maximum, row_sum, rows, columns, slope, leaning,
            buffers, work, span, scores, COLUMNS, True,
        )  # fmt: skip
    if OWN_BUFFER and not Q_IN_REGISTERS:
        mbarrier.arrive(buffers.q_empty.index(consumer), count=1)
    step = earlier + work.end - work.begin - 1
    mbarrier.wait(buffers.v_full.index(step % STAGES), (step // STAGES) & 1)
    output = warpgroup_mma(
        unpacked(p, buffers.v.dtype, P_LAYOUT), buffers.v.index(step % STAGES), output, is_async=True
    )
    output = warpgroup_mma_wait(0, deps=(output,))
    mbarrier.arrive(buffers.v_empty.index(step % STAGES), count=1)

    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    output = output * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT)), 1)
    place = (work.batch * heads + work.head).to(gl.int64) * span.queries + work.before_q
    gl.store(lse + place + rows, (maximum + gl.log2(row_sum) - tilt) * LN_2, mask=rows < work.len_q)
    first = work.first_row + consumer * ROWS
    rows_at = work.batch, work.head, work.before_q, first, work.len_q
    write(out_tiles, out, out_strides, output, rows_at, buffers.out.index(consumer), places is not None, VALUE_DIM)
    if not OWN_BUFFER:
        tma.store_wait(0)  # the output went through Q's buffer
        mbarrier.arrive(buffers.q_empty.index(consumer), count=1)


@gluon.jit
def attention_forward_hopper(
    q_tiles, k_tiles, v_tiles, out_tiles, out, out_strides, lse, sinks, counter, places, span, scores, batches, heads,
    group,
    VALUE_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, BLOCK_VALUE_DIM: gl.constexpr, COLUMNS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, OWN_BUFFER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as run at once. `counter` is 0 at the start; `places` is None, or see `blocks_of`."""
    dtype: gl.constexpr = q_tiles.dtype
    q = shared(dtype, CONSUMERS, ROWS, BLOCK_DIM)
    if OWN_BUFFER:
        out_buffer = shared(dtype, CONSUMERS, ROWS, BLOCK_VALUE_DIM)
    else:  # large heads leave no room for one of its own
        out_buffer = q
    buffers = Buffers(
        q=q,
        out=out_buffer,
        k=shared(dtype, STAGES, COLUMNS, BLOCK_DIM),
        v=shared(dtype, STAGES, COLUMNS, BLOCK_VALUE_DIM),
        q_full=barriers(CONSUMERS, 1),
        q_empty=barriers(CONSUMERS, 1),
        k_full=barriers(STAGES, 1),
        k_empty=barriers(STAGES, CONSUMERS),
        v_full=barriers(STAGES, 1),
        v_empty=barriers(STAGES, CONSUMERS),
        v_raw=barriers(1, 1).index(0),
        next=gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        next_full=barriers(2, 1),
        next_empty=barriers(2, CONSUMERS),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (produce, (q_tiles, k_tiles, v_tiles, counter, buffers, places, span, batches, heads, group, COLUMNS,
                       BLOCK_VALUE_DIM)),
            (consume, (out_tiles, out, out_strides, lse, sinks, places, span, scores, batches, heads, group,
                       buffers, 0, VALUE_DIM, BLOCK_VALUE_DIM, COLUMNS, Q_IN_REGISTERS, OWN_BUFFER)),
            (consume, (out_tiles, out, out_strides, lse, sinks, places, span, scores, batches, heads, group,
                       buffers, 1, VALUE_DIM, BLOCK_VALUE_DIM, COLUMNS, Q_IN_REGISTERS, OWN_BUFFER)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
