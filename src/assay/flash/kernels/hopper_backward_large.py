"""dK and dV on Hopper for heads of up to 256: two warpgroups, each of which sums one of them up.

    Sᵀ = K·Qᵀ,  P = 2^(S − LSE),  dV = Pᵀ·dO            the first
    dPᵀ = V·dOᵀ,  dS = P∘(dP − delta),  dK = dSᵀ·Q·scale   the second, with P of the first

A tile is 64 keys of one head of K and V: the sums of both fill the registers. Four warps (the producer) bring Q, dO,
LSE and delta by the copy engine, 64 rows at a time, of every query head of the group. Each warpgroup issues its sum of
the last block and its scores of the next together. P goes from one to the other through shared memory, while the tensor
cores work for the other one: the first computes exponentials while dP runs, the second dS while dV does.

Nothing is added up in memory: the bits are the same every time.
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

from assay.flash.kernels.gluon_names import copy_in, thread_barrier
from assay.flash.kernels.hopper_backward_q import put
from assay.flash.kernels.hopper_fragments import as_fragment, in_order
from assay.flash.kernels.hopper_keys import blocks_of, work_of
from assay.flash.kernels.hopper_queue import claim, next_tile, numbers, tell_tile
from assay.flash.kernels.hopper_shared import (
    LOG2_E,
    ROWS,
    barriers,
    clean,
    lines,
    packed,
    shared,
    tanh,
    unpacked,
    zero_unknown_to_compiler,
)

KEYS = gl.constexpr(64)  # of a tile
STAGES = gl.constexpr(2)
TOGETHER = gl.constexpr(4)  # heads
UP = gl.constexpr(12)
"""P is computed 2¹² times as large: then FP16 holds small ones as well, and a P that rounding makes larger than 1."""


class Buffers(NamedTuple):
    """Shared memory and the barriers that say when it is full and when it may be written again."""

    k: Any
    """One tile; dV leaves through it, since only the first warpgroup reads it."""
    v: Any
    """One tile; dK leaves through it."""
    q: Any
    do: Any
    lse: Any
    """Beside Q."""
    delta: Any
    """Beside dO."""
    p: Any
    """From the first to the second."""
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    raw: Any
    """Packed: Q or dO is there, and not yet cleaned."""
    p_full: Any
    p_empty: Any
    next: Any
    """The number of the next tile, from the producer to the others."""
    next_full: Any
    next_empty: Any


@gluon.jit
def produce(
    q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, room, counter, buffers, places, span, batches,
    kv_heads, group,
):  # fmt: skip
    """Tile after tile: K and V, and block by block Q with the LSE and dO with delta."""
    tiles = blocks_of(places, span, KEYS) * batches * kv_heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    cleaned = 0
    while tile < tiles:
        work = work_of(tile, places, span, batches, kv_heads, TOGETHER, KEYS, ROWS)
        keys_at = [work.batch, work.kv_head, work.before_k + work.first_key, 0]
        head = work.kv_head * group
        block = work.begin
        for i in range((work.end - work.begin) * group):
            rows_at = [work.batch, head, work.before_q + block * ROWS, 0]
            line = (work.batch * (kv_heads * group) + head) * room + work.line + block * ROWS
            there = work.len_q - block * ROWS
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(buffers.q_empty.index(stage), phase)
            cleaned = bring(
                q_tiles, lse_tiles, rows_at, line, buffers.q.index(stage), buffers.lse.index(stage),
                buffers.q_full.index(stage), buffers.raw, there, cleaned, places is not None,
            )  # fmt: skip
            if i == 0:
                mbarrier.wait(buffers.k_empty, (count & 1) ^ 1)
                mbarrier.expect(buffers.k_full, k_tiles.block_type.nbytes)
                copy_in(k_tiles, keys_at, buffers.k_full, buffers.k.index(0))
            mbarrier.wait(buffers.do_empty.index(stage), phase)
            cleaned = bring(
                do_tiles, delta_tiles, rows_at, line, buffers.do.index(stage), buffers.delta.index(stage),
                buffers.do_full.index(stage), buffers.raw, there, cleaned, places is not None,
            )  # fmt: skip
            if i == 0:
                mbarrier.wait(buffers.v_empty, (count & 1) ^ 1)
                mbarrier.expect(buffers.v_full, v_tiles.block_type.nbytes)
                copy_in(v_tiles, keys_at, buffers.v_full, buffers.v.index(0))
            block += 1
            if block == work.end:
                block = work.begin
                head += 1
            step += 1
        tile = claim(counter, tiles)  # only now: claimed early it may wait here while another CTA is free
        tell_tile(tile, buffers, count)
        count += 1


@gluon.jit
def bring(tiles, lines, place, line, buffer, line_buffer, full, raw, there, cleaned, PACKED: gl.constexpr):
    """64 rows of a matrix, and their numbers of a line. Packed: of the last ones only those that are `there`."""
    if PACKED and there < ROWS:
        mbarrier.expect(raw, tiles.block_type.nbytes + lines.block_type.nbytes)
        copy_in(tiles, place, raw, buffer)
        copy_in(lines, [line], raw, line_buffer)
        mbarrier.wait(raw, cleaned & 1)
        clean(buffer, there)
        mbarrier.arrive(full, count=1)
        cleaned += 1
    else:
        mbarrier.expect(full, tiles.block_type.nbytes + lines.block_type.nbytes)
        copy_in(tiles, place, full, buffer)
        copy_in(lines, [line], full, line_buffer)
    return cleaned


@gluon.jit
def send(s, block, member, step, buffers, work, span, scores, heads, group, P_LAYOUT: gl.constexpr):
    """Sᵀ of a block → P for dV, and for the other warpgroup, with a softcap times its slant, 1 − tanh²."""
    KEY_LAYOUT: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    dtype: gl.constexpr = buffers.q.dtype
    keys = gl.expand_dims(work.first_key + gl.arange(0, KEYS, KEY_LAYOUT), 1)
    rows = gl.expand_dims(block * ROWS + gl.arange(0, ROWS, ROW_LAYOUT), 0)
    shift = work.len_k - work.len_q
    lse = buffers.lse.index(step % STAGES).load(ROW_LAYOUT) - UP
    slant = 1.0
    if scores.cap is not None:
        bent = tanh(s * scores.scale)
        s = bent * scores.cap
        slant = 1.0 - bent * bent
    else:
        s = s * scores.scale
    if scores.slopes is not None:
        slope = gl.load(scores.slopes + work.sequence * heads + work.kv_head * group + member) * LOG2_E
        s -= slope * gl.abs((rows + shift).to(gl.float32) - keys.to(gl.float32))
    p = gl.exp2(s - gl.expand_dims(lse, 0))
    if block < work.whole_begin or block >= work.whole_end:
        seen = rows < work.len_q
        if span.right is not None:
            seen &= rows >= keys - (shift + span.right)
        if span.left is not None:
            seen &= rows <= keys - (shift - span.left)
        p = gl.where(seen, p, 0.0)
    mbarrier.wait(buffers.p_empty, (step & 1) ^ 1)
    if dtype == gl.bfloat16:
        buffers.p.store(in_order(packed(p * slant, gl.float16)))
    else:  # FP16 holds too few bits to be rounded to twice
        buffers.p.store(in_order(p * slant))
    thread_barrier()  # all have written P, and read the LSE
    mbarrier.arrive(buffers.p_full, count=1)
    mbarrier.arrive(buffers.q_empty.index(step % STAGES), count=1)
    return packed(gl.convert_layout(p, P_LAYOUT), dtype)


@gluon.jit
def receive(dp, block, step, buffers, work, PACKED: gl.constexpr, DS_LAYOUT: gl.constexpr):
    """dPᵀ of a block → dS."""
    S_LAYOUT: gl.constexpr = dp.type.layout
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dtype: gl.constexpr = buffers.q.dtype
    delta = buffers.delta.index(step % STAGES).load(ROW_LAYOUT) * 2.0**-UP
    if PACKED:  # behind the last row there may be anything
        delta = gl.where(block * ROWS + gl.arange(0, ROWS, ROW_LAYOUT) < work.len_q, delta, 0.0)
    dp = dp * 2.0**-UP - gl.expand_dims(delta, 0)
    mbarrier.wait(buffers.p_full, step & 1)
    if dtype == gl.bfloat16:
        like = in_order(packed(dp, gl.float16))
        p = unpacked(as_fragment(buffers.p.load(like.type.layout)), gl.float16, S_LAYOUT).to(gl.float32)
    else:
        like = in_order(dp)
        p = gl.convert_layout(as_fragment(buffers.p.load(like.type.layout)), S_LAYOUT)
    thread_barrier()  # all have read P and delta
    mbarrier.arrive(buffers.p_empty, count=1)
    mbarrier.arrive(buffers.do_empty.index(step % STAGES), count=1)
    return packed(gl.convert_layout(p * dp, DS_LAYOUT), dtype)


@gluon.jit
def sum_values(
    dv_tiles, dv_out, dv_strides, places, span, scores, batches, kv_heads, group, buffers,
    VALUE_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: P and dV of tile after tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DV_LAYOUT, 2)
    dtype: gl.constexpr = buffers.q.dtype
    heads = kv_heads * group
    tiles = blocks_of(places, span, KEYS) * batches * kv_heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    while tile < tiles:
        work = work_of(tile, places, span, batches, kv_heads, TOGETHER, KEYS, ROWS)
        dv = gl.zeros([KEYS, BLOCK_DIM], gl.float32, DV_LAYOUT)
        empty = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
        block = work.begin
        member = 0
        mbarrier.wait(buffers.k_full, count & 1)
        mbarrier.wait(buffers.q_full.index(step % STAGES), (step // STAGES) & 1)
        first = buffers.q.index(step % STAGES).permute((1, 0))
        s = warpgroup_mma(buffers.k.index(0), first, empty, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        p = send(s, block, member, step, buffers, work, span, scores, heads, group, P_LAYOUT)
        for _ in range(1, (work.end - work.begin) * group):
            before = step % STAGES
            mbarrier.wait(buffers.do_full.index(before), (step // STAGES) & 1)
            dv = warpgroup_mma(unpacked(p, dtype, P_LAYOUT), buffers.do.index(before), dv, is_async=True)
            step += 1
            block += 1
            if block == work.end:
                block = work.begin
                member += 1
            mbarrier.wait(buffers.q_full.index(step % STAGES), (step // STAGES) & 1)
            empty = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
            k = buffers.k.index(zero_unknown_to_compiler(step))
            q = buffers.q.index(step % STAGES).permute((1, 0))
            s = warpgroup_mma(k, q, empty, use_acc=False, is_async=True)
            dv = warpgroup_mma_wait(1, deps=(dv,))
            mbarrier.arrive(buffers.do_empty.index(before), count=1)
            s = warpgroup_mma_wait(0, deps=(s,))
            p = send(s, block, member, step, buffers, work, span, scores, heads, group, P_LAYOUT)
        mbarrier.wait(buffers.do_full.index(step % STAGES), (step // STAGES) & 1)
        dv = warpgroup_mma(unpacked(p, dtype, P_LAYOUT), buffers.do.index(step % STAGES), dv, is_async=True)
        dv = warpgroup_mma_wait(0, deps=(dv,))
        mbarrier.arrive(buffers.do_empty.index(step % STAGES), count=1)
        step += 1
        place = work.batch, work.kv_head, work.before_k, work.first_key, work.len_k
        put(dv_tiles, dv_out, dv_strides, dv * 2.0**-UP, place, buffers.k.index(0), places is not None, VALUE_DIM)
        tma.store_wait(0)
        mbarrier.arrive(buffers.k_empty, count=1)
        tile = next_tile(buffers, count)
        count += 1


@gluon.jit
def sum_keys(
    dk_tiles, dk_out, dk_strides, gradient_scale, places, span, batches, kv_heads, group, buffers,
    DIM: gl.constexpr, BLOCK_DIM: gl.constexpr,
):  # fmt: skip
    """The second warpgroup: dS and dK of tile after tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DIM, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    PACKED: gl.constexpr = places is not None
    dtype: gl.constexpr = buffers.q.dtype
    tiles = blocks_of(places, span, KEYS) * batches * kv_heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    while tile < tiles:
        work = work_of(tile, places, span, batches, kv_heads, TOGETHER, KEYS, ROWS)
        dk = gl.zeros([KEYS, BLOCK_DIM], gl.float32, DK_LAYOUT)
        empty = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
        block = work.begin
        mbarrier.wait(buffers.v_full, count & 1)
        mbarrier.wait(buffers.do_full.index(step % STAGES), (step // STAGES) & 1)
        first = buffers.do.index(step % STAGES).permute((1, 0))
        dp = warpgroup_mma(buffers.v.index(0), first, empty, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = receive(dp, block, step, buffers, work, PACKED, DS_LAYOUT)
        for _ in range(1, (work.end - work.begin) * group):
            before = step % STAGES
            mbarrier.wait(buffers.q_full.index(before), (step // STAGES) & 1)
            dk = warpgroup_mma(unpacked(ds, dtype, DS_LAYOUT), buffers.q.index(before), dk, is_async=True)
            step += 1
            block += 1
            if block == work.end:
                block = work.begin
            mbarrier.wait(buffers.do_full.index(step % STAGES), (step // STAGES) & 1)
            empty = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
            v = buffers.v.index(zero_unknown_to_compiler(step))
            do = buffers.do.index(step % STAGES).permute((1, 0))
            dp = warpgroup_mma(v, do, empty, use_acc=False, is_async=True)
            dk = warpgroup_mma_wait(1, deps=(dk,))
            mbarrier.arrive(buffers.q_empty.index(before), count=1)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = receive(dp, block, step, buffers, work, PACKED, DS_LAYOUT)
        mbarrier.wait(buffers.q_full.index(step % STAGES), (step // STAGES) & 1)
        dk = warpgroup_mma(unpacked(ds, dtype, DS_LAYOUT), buffers.q.index(step % STAGES), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(buffers.q_empty.index(step % STAGES), count=1)
        step += 1
        place = work.batch, work.kv_head, work.before_k, work.first_key, work.len_k
        put(dk_tiles, dk_out, dk_strides, dk * gradient_scale, place, buffers.v.index(0), PACKED, DIM)
        tma.store_wait(0)
        mbarrier.arrive(buffers.v_empty, count=1)
        tile = next_tile(buffers, count)
        count += 1


@gluon.jit
def attention_backward_large_hopper(
    q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, dk_tiles, dv_tiles, dk_out, dv_out, dk_strides,
    dv_strides, room, gradient_scale, counter, places, span, scores, batches, kv_heads, group,
    DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as run at once. `counter` is 0 before and after; `places` is None, or see `blocks_of`.

    `lse_tiles` and `delta_tiles` are 64 numbers of the (B·H·room) that `attention_prepare_backward` fills, in one line.
    """
    dtype: gl.constexpr = q_tiles.dtype
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if dtype == gl.bfloat16:
        p = gl.allocate_shared_memory(gl.uint32, [4, 512], PLAIN)
    else:
        p = gl.allocate_shared_memory(gl.float32, [8, 512], PLAIN)
    buffers = Buffers(
        k=shared(dtype, 1, KEYS, BLOCK_DIM),
        v=shared(dtype, 1, KEYS, BLOCK_DIM),
        q=shared(dtype, STAGES, ROWS, BLOCK_DIM),
        do=shared(dtype, STAGES, ROWS, BLOCK_DIM),
        lse=lines(STAGES, ROWS),
        delta=lines(STAGES, ROWS),
        p=p,
        k_full=barriers(1, 1).index(0),
        k_empty=barriers(1, 1).index(0),
        v_full=barriers(1, 1).index(0),
        v_empty=barriers(1, 1).index(0),
        q_full=barriers(STAGES, 1),
        q_empty=barriers(STAGES, 2),
        do_full=barriers(STAGES, 1),
        do_empty=barriers(STAGES, 2),
        raw=None if places is None else barriers(1, 1).index(0),
        p_full=barriers(1, 1).index(0),
        p_empty=barriers(1, 1).index(0),
        next=numbers(2),
        next_full=barriers(2, 1),
        next_empty=barriers(2, 2),
    )
    fence_async_shared()  # what threads wrote so far, the copy engine and the tensor cores may see
    gl.warp_specialize(
        [
            (produce, (q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, room, counter, buffers, places,
                       span, batches, kv_heads, group)),
            (sum_values, (dv_tiles, dv_out, dv_strides, places, span, scores, batches, kv_heads, group, buffers,
                          VALUE_DIM, BLOCK_DIM)),
            (sum_keys, (dk_tiles, dk_out, dk_strides, gradient_scale, places, span, batches, kv_heads, group, buffers,
                        DIM, BLOCK_DIM)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
