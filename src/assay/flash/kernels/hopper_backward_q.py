"""dQ on Hopper, by rows: nothing is added up in memory, so the bits are the same every time.

    dP = dO·Vᵀ,  P = 2^(S − LSE),  dS = P∘(dP − delta),  dQ = dS·K·scale

A tile is 128 rows of one head. As in the forward kernel late rows go first and keys come from right to left: a producer
brings K and V by the copy engine, two consumers have 64 rows each. A consumer issues dQ of the last block and S of the
next together, then dP; while dP runs it computes the exponentials. dQ goes first, so that its block of K, the oldest,
is free early, and dS leaves its registers before dP needs them.
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

from assay.flash.kernels.gluon_names import copy_in, copy_out, thread_barrier
from assay.flash.kernels.hopper_queue import claim, next_tile, numbers, tell_tile
from assay.flash.kernels.hopper_rows import blocks_of, seen, work_of
from assay.flash.kernels.hopper_shared import (
    LOG2_E,
    ROWS,
    barriers,
    clean,
    line_of,
    packed,
    shared,
    tanh,
    unpacked,
    zero_unknown_to_compiler,
)

CONSUMERS = gl.constexpr(2)
TILE = gl.constexpr(128)  # rows, of both


class Buffers(NamedTuple):
    """Shared memory and the barriers that say when it is full and when it may be written again."""

    q: Any
    do: Any
    out: Any
    k: Any
    v: Any
    q_full: Any
    """Q and dO."""
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    k_raw: Any
    """Packed: K is there, and not yet cleaned."""
    next: Any
    """The number of the next tile, from the producer to the consumers."""
    next_full: Any
    next_empty: Any


class Rows(NamedTuple):
    """What a consumer knows of its 64 rows."""

    number: Any
    """Within the sequence."""
    lse: Any
    """In units of log₂; +∞ for rows that are not there or see nothing."""
    delta: Any
    slope: Any
    """ALiBi's, in units of log₂."""
    columns: Any
    """0, 1, …: the keys of a block."""


@gluon.jit
def produce(
    q_tiles, do_tiles, k_tiles, v_tiles, counter, buffers, places, span, batches, heads, group
):  # fmt: skip
    """Tile after tile: Q and dO, then K and V block by block, from right to left."""
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    K_STAGES: gl.constexpr = buffers.k.shape[0]
    V_STAGES: gl.constexpr = buffers.v.shape[0]
    tiles = blocks_of(places, span, TILE) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    cleaned = 0
    while tile < tiles:
        work = work_of(tile, places, span, batches, heads, group, TILE, COLUMNS)
        for consumer in gl.static_range(CONSUMERS):
            full = buffers.q_full.index(consumer)
            mbarrier.wait(buffers.q_empty.index(consumer), (count & 1) ^ 1)
            mbarrier.expect(full, q_tiles.block_type.nbytes + do_tiles.block_type.nbytes)
            place = [work.batch, work.head, work.before_q + work.first_row + consumer * ROWS, 0]
            copy_in(q_tiles, place, full, buffers.q.index(consumer))
            copy_in(do_tiles, place, full, buffers.do.index(consumer))
        for back in range(work.end - work.begin):
            start = (work.end - 1 - back) * COLUMNS
            place = [work.batch, work.kv_head, work.before_k + start, 0]
            stage = step % K_STAGES
            mbarrier.wait(buffers.k_empty.index(stage), ((step // K_STAGES) & 1) ^ 1)
            k = buffers.k.index(stage)
            if places is not None and start + COLUMNS > work.len_k:
                mbarrier.expect(buffers.k_raw, k_tiles.block_type.nbytes)
                copy_in(k_tiles, place, buffers.k_raw, k)
                mbarrier.wait(buffers.k_raw, cleaned & 1)
                clean(k, work.len_k - start)
                mbarrier.arrive(buffers.k_full.index(stage), count=1)
                cleaned += 1
            else:
                mbarrier.expect(buffers.k_full.index(stage), k_tiles.block_type.nbytes)
                copy_in(k_tiles, place, buffers.k_full.index(stage), k)
            stage = step % V_STAGES
            mbarrier.wait(buffers.v_empty.index(stage), ((step // V_STAGES) & 1) ^ 1)
            mbarrier.expect(buffers.v_full.index(stage), v_tiles.block_type.nbytes)
            copy_in(v_tiles, place, buffers.v_full.index(stage), buffers.v.index(stage))
            step += 1
        tile = claim(counter, tiles)  # only now: claimed early it may wait here while another CTA is free
        tell_tile(tile, buffers, count)
        count += 1


@gluon.jit
def probabilities(s, start, own, work, scores):
    """P of one block; with a softcap times its slant, 1 − tanh²."""
    slant = 1.0
    if scores.cap is not None:
        bent = tanh(s * scores.scale)
        s = bent * scores.cap
        slant = 1.0 - bent * bent
    else:
        s = s * scores.scale
    if scores.slopes is not None:
        position = (own.number + (work.len_k - work.len_q)).to(gl.float32)
        keys = (start + own.columns).to(gl.float32)
        s -= own.slope * gl.abs(gl.expand_dims(position, 1) - gl.expand_dims(keys, 0))
    return gl.exp2(s - gl.expand_dims(own.lse, 1)) * slant


@gluon.jit
def gradient(p, dp, start, own, work, span, MASKED: gl.constexpr):
    """dS of one block. Masked only here: hidden keys may hold anything, also NaN."""
    ds = p * (dp - gl.expand_dims(own.delta, 1))
    if MASKED:
        ds = gl.where(seen(own.number, start + own.columns, work, span), ds, 0.0)
    return ds


@gluon.jit
def over_blocks(
    first, last, earlier, ds, dq, own, buffers, work, span, scores,
    consumer: gl.constexpr, LARGE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last`, counted from the right; `earlier` is how many came before this tile.

    On entry dS of the block before waits for its product with K; on exit that of the last.
    """
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    K_STAGES: gl.constexpr = buffers.k.shape[0]
    V_STAGES: gl.constexpr = buffers.v.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    for back in range(first, last):
        step = earlier + back
        before, stage, v_stage = (step - 1) % K_STAGES, step % K_STAGES, step % V_STAGES
        empty = gl.zeros([ROWS, COLUMNS], gl.float32, S_LAYOUT)
        here = consumer
        if LARGE:  # looked up at every turn: addresses kept around the loop would fill the registers
            here += zero_unknown_to_compiler(step)
        q, do = buffers.q.index(here), buffers.do.index(here)
        dq = warpgroup_mma(unpacked(ds, buffers.k.dtype, DS_LAYOUT), buffers.k.index(before), dq, is_async=True)
        mbarrier.wait(buffers.k_full.index(stage), (step // K_STAGES) & 1)
        s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        mbarrier.arrive(buffers.k_empty.index(before), count=1)
        mbarrier.wait(buffers.v_full.index(v_stage), (step // V_STAGES) & 1)
        dp = warpgroup_mma(do, buffers.v.index(v_stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        start = (work.end - 1 - back) * COLUMNS
        p = probabilities(s, start, own, work, scores)
        # Open since before dP. Without it the assembler puts the exponentials behind the wait for dP.
        mbarrier.wait(buffers.v_full.index(v_stage), (step // V_STAGES) & 1)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(buffers.v_empty.index(v_stage), count=1)
        exact = gradient(p, dp, start, own, work, span, MASKED)
        ds = packed(gl.convert_layout(exact, DS_LAYOUT), buffers.k.dtype)
    return ds, dq


@gluon.jit
def consume(
    dq_tiles, dq_out, dq_strides, log2_lse, delta, room, gradient_scale, places, span, scores, batches, heads, group,
    buffers, consumer: gl.constexpr, DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, LARGE: gl.constexpr,
):  # fmt: skip
    """Its 64 rows of tile after tile."""
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    tiles = blocks_of(places, span, TILE) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    while tile < tiles:
        work = work_of(tile, places, span, batches, heads, group, TILE, COLUMNS)
        dq = attend(
            log2_lse, delta, room, places, span, scores, heads, buffers, work, count, step,
            consumer, BLOCK_DIM, LARGE,
        )  # fmt: skip
        step += work.end - work.begin
        if LARGE:  # worked out again: kept over the loops it would fill the registers
            work = work_of(tile + zero_unknown_to_compiler(step), places, span, batches, heads, group, TILE, COLUMNS)
        rows_at = work.batch, work.head, work.before_q, work.first_row + consumer * ROWS, work.len_q
        buffer = buffers.out.index(consumer)
        put(dq_tiles, dq_out, dq_strides, dq * gradient_scale, rows_at, buffer, places is not None, DIM)
        if LARGE:
            tma.store_wait(0)  # dQ went through Q's buffer
            mbarrier.arrive(buffers.q_empty.index(consumer), count=1)
        tile = next_tile(buffers, count)
        count += 1
    tma.store_wait(0)


@gluon.jit
def attend(
    log2_lse, delta, room, places, span, scores, heads, buffers, work, count, earlier,
    consumer: gl.constexpr, BLOCK_DIM: gl.constexpr, LARGE: gl.constexpr,
):  # fmt: skip
    """dQ of 64 rows, over all their blocks of keys; `earlier` is how many came before this tile, the count-th."""
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    K_STAGES: gl.constexpr = buffers.k.shape[0]
    V_STAGES: gl.constexpr = buffers.v.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DIM, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    dtype: gl.constexpr = buffers.k.dtype
    first = work.first_row + consumer * ROWS
    number = first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    line = (work.batch * heads + work.head).to(gl.int64) * room
    if places is not None:
        line += line_of(work.before_q, work.sequence)
    there = number < work.len_q
    slope = 0.0
    if scores.slopes is not None:
        slope = gl.load(scores.slopes + work.sequence * heads + work.head) * LOG2_E
    own = Rows(
        number,
        gl.load(log2_lse + line + number, mask=there, other=float("inf")),
        gl.load(delta + line + number, mask=there, other=0.0),
        slope,
        gl.arange(0, COLUMNS, gl.SliceLayout(0, S_LAYOUT)),
    )
    dq = gl.zeros([ROWS, BLOCK_DIM], gl.float32, DQ_LAYOUT)
    empty = gl.zeros([ROWS, COLUMNS], gl.float32, S_LAYOUT)

    mbarrier.wait(buffers.q_full.index(consumer), count & 1)
    q, do = buffers.q.index(consumer), buffers.do.index(consumer)
    stage, v_stage = earlier % K_STAGES, earlier % V_STAGES
    mbarrier.wait(buffers.k_full.index(stage), (earlier // K_STAGES) & 1)
    s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    mbarrier.wait(buffers.v_full.index(v_stage), (earlier // V_STAGES) & 1)
    dp = warpgroup_mma(do, buffers.v.index(v_stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    start = (work.end - 1) * COLUMNS
    p = probabilities(s, start, own, work, scores)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(buffers.v_empty.index(v_stage), count=1)
    ds = packed(gl.convert_layout(gradient(p, dp, start, own, work, span, True), DS_LAYOUT), dtype)

    right = gl.maximum(work.end - work.whole_end, 1)
    left = gl.maximum(work.end - work.whole_begin, right)
    rest = own, buffers, work, span, scores
    ds, dq = over_blocks(1, right, earlier, ds, dq, *rest, consumer, LARGE, True)
    ds, dq = over_blocks(right, left, earlier, ds, dq, *rest, consumer, LARGE, False)
    if span.left is not None:
        ds, dq = over_blocks(left, work.end - work.begin, earlier, ds, dq, *rest, consumer, LARGE, True)
    if not LARGE:
        mbarrier.arrive(buffers.q_empty.index(consumer), count=1)
    stage = (earlier + work.end - work.begin - 1) % K_STAGES
    dq = warpgroup_mma(unpacked(ds, dtype, DS_LAYOUT), buffers.k.index(stage), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(buffers.k_empty.index(stage), count=1)
    return dq


@gluon.jit
def put(tiles, out, strides, values, place, buffer, PACKED: gl.constexpr, DIM: gl.constexpr):
    """64 rows to memory through `buffer`: by the copy engine, or by the threads what it cannot do (see `write`)."""
    batch, head, before, first, length = place
    tma.store_wait(0)  # the one before may still be read
    buffer.store(values.to(out.dtype.element_ty))
    if tiles is not None:
        if not PACKED or first + ROWS <= length:
            fence_async_shared()
            copy_out(tiles, [batch, head, before + first, 0], buffer)
        else:
            put_rows(out, strides, buffer, batch, head, before, first, length, DIM)
    else:
        put_rows(out, strides, buffer, batch, head, before, first, length, DIM)


@gluon.jit
def put_rows(out, strides, buffer, batch, head, before, first, length, DIM: gl.constexpr):
    """By the threads, 16 rows at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    thread_barrier()
    dims = gl.expand_dims(gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    out += batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    for i in gl.static_range(ROWS // 16):
        rows = first + 16 * i + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        place = gl.expand_dims((before + rows).to(gl.int64) * strides[2], 1) + dims
        mask = gl.expand_dims(rows < length, 1) & (dims < DIM)
        gl.store(out + place, buffer.slice(16 * i, 16).load(LAYOUT), mask=mask)
    fence_async_shared()
    thread_barrier()  # all have read: the copy engine may write again


@gluon.jit
def attention_backward_q_hopper(
    q_tiles, do_tiles, k_tiles, v_tiles, dq_tiles, dq_out, dq_strides, log2_lse, delta, room, gradient_scale, counter,
    places, span, scores, batches, heads, group,
    DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, BLOCK_VALUE_DIM: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as run at once. `counter` is 0 before and after; `places` is None, or see `blocks_of`.

    `log2_lse` and `delta` are (B·H, room), see `attention_prepare_backward`.
    """
    dtype: gl.constexpr = q_tiles.dtype
    COLUMNS: gl.constexpr = k_tiles.block_type.shape[2]
    LARGE: gl.constexpr = BLOCK_DIM > 128 or BLOCK_VALUE_DIM > 128  # they fill the registers, and shared memory
    K_STAGES: gl.constexpr = 2
    V_STAGES: gl.constexpr = 1 if LARGE else 2
    q = shared(dtype, CONSUMERS, ROWS, BLOCK_DIM)
    if LARGE:  # no room for one of its own
        out_buffer = q
    else:
        out_buffer = shared(dtype, CONSUMERS, ROWS, BLOCK_DIM)
    buffers = Buffers(
        q=q,
        do=shared(dtype, CONSUMERS, ROWS, BLOCK_VALUE_DIM),
        out=out_buffer,
        k=shared(dtype, K_STAGES, COLUMNS, BLOCK_DIM),
        v=shared(dtype, V_STAGES, COLUMNS, BLOCK_VALUE_DIM),
        q_full=barriers(CONSUMERS, 1),
        q_empty=barriers(CONSUMERS, 1),
        k_full=barriers(K_STAGES, 1),
        k_empty=barriers(K_STAGES, CONSUMERS),
        v_full=barriers(V_STAGES, 1),
        v_empty=barriers(V_STAGES, CONSUMERS),
        k_raw=None if places is None else barriers(1, 1).index(0),
        next=numbers(2),
        next_full=barriers(2, 1),
        next_empty=barriers(2, CONSUMERS),
    )
    fence_async_shared()  # what threads wrote so far, the copy engine and the tensor cores may see
    gl.warp_specialize(
        [
            (produce, (q_tiles, do_tiles, k_tiles, v_tiles, counter, buffers, places, span, batches, heads,
                       group)),
            (consume, (dq_tiles, dq_out, dq_strides, log2_lse, delta, room, gradient_scale, places, span, scores,
                       batches, heads, group, buffers, 0, DIM, BLOCK_DIM, LARGE)),
            (consume, (dq_tiles, dq_out, dq_strides, log2_lse, delta, room, gradient_scale, places, span, scores,
                       batches, heads, group, buffers, 1, DIM, BLOCK_DIM, LARGE)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
