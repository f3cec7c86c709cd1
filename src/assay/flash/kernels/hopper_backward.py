"""Backward on Hopper in one pass: five products a tile, all on tensor cores that seldom wait.

A tile is 128 keys of one head, of which two warpgroups (the consumers) have 64 each; four more warps (the producer)
bring Q, dO, LSE and delta of block after block of rows by the copy engine (TMA), of every query head that shares the
keys. A CTA stays and takes tile after tile: whoever is free takes the next (an atomic counter). All products are
(keys, rows):

    Sᵀ = K·Qᵀ,  dPᵀ = V·dOᵀ,  P = 2^(S − LSE),  dS = P∘(dP − delta),  dV += Pᵀ·dO,  dK += dSᵀ·Q

P and dS stay in registers for dV and dK. dQ = dS·K sums over keys, of which a tile has only some: the consumers give
each other their dS through shared memory, each multiplies one half of the result, one block of rows later, and the
copy engine adds it up in memory, in FP32 and in the order in which the tiles come; for heads that a CTA has ALONE, that
is always the same. `attention_cast_dq` makes the gradient of it.

Without ADD_Q only dK and dV are computed, with the same bits every time; dQ is then `hopper_backward_q`'s.
The arithmetic is that of `backward`; what this cannot do (bias, dropout, FP32) goes there.
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

from assay.flash.kernels.gluon_names import reinterpret, thread_barrier
from assay.flash.kernels.hopper_alibi import bounded, lean_of_keys, leaning_rows
from assay.flash.kernels.hopper_backward_loads import KEYS, STAGES, Buffers, produce
from assay.flash.kernels.hopper_backward_sums import NOWHERE, add_q, last_q, multiply_q, place_of_sums
from assay.flash.kernels.hopper_keys import blocks_of, first_block, work_of
from assay.flash.kernels.hopper_queue import next_tile, numbers
from assay.flash.kernels.hopper_shared import (
    LOG2_E,
    ROWS,
    barriers,
    lines,
    shared,
    stage_of,
    stores_done,
    tanh,
    write,
    zero_unknown_to_compiler,
)


class Steps(NamedTuple):
    """Of a tile among the CTA's."""

    count: Any
    """Tiles before it."""
    first: Any
    """Its first step, if dQ of the tile before is multiplied then, else −1."""
    last: Any
    """Its last step."""


@gluon.jit
def is_masked(block, work):
    """Keys that are not there are masked, too: no LSE counts them, their P may be infinite, and 0 · ∞ is NaN."""
    return (block < work.whole_begin) | (block >= work.whole_end) | (work.first_key + KEYS > work.len_k)


@gluon.jit
def probabilities(s, lse, first_row, first_key, masked, slope, work, span, scores, LEANING: gl.constexpr):
    """P of a tile of S, and what dS is of dP − delta: P again, with a softcap times its slant, 1 − tanh².

    LEANING: S leans within the tile (see `hopper_alibi`).
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
    keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    shift = work.len_k - work.len_q
    unit = scores.scale
    if scores.cap is not None:
        s = tanh(s * scores.scale)
        unit = scores.cap
    bent = s
    if LEANING:
        lse -= slope * (first_key - (first_row + shift)).to(gl.float32)
    elif scores.near is not None:  # counted from the block's first position
        lse += slope * row.to(gl.float32)
        s += gl.expand_dims(slope / unit * (keys - (first_row + shift)).to(gl.float32), 1)
    s = s * unit
    if scores.slopes is not None and scores.near is None:
        position = (first_row + shift + row).to(gl.float32)
        s -= slope * gl.abs(gl.expand_dims(position, 0) - gl.expand_dims(keys.to(gl.float32), 1))
    p = gl.exp2(s - gl.expand_dims(lse, 0))
    if masked:
        rows, upright = gl.expand_dims(first_row + row, 0), gl.expand_dims(keys, 1)
        seen = (upright < work.len_k) & (rows < work.len_q)
        if span.right is not None:
            seen &= upright <= rows + (shift + span.right)
        if span.left is not None:
            seen &= upright >= rows + (shift - span.left)
        p = gl.where(seen, p, 0.0)
    slanted = p
    if scores.cap is not None:
        slanted = p * (1.0 - bent * bent)
    return p, slanted


@gluon.jit
def give(ds, buffer):
    """dSᵀ to shared memory, as (rows, keys)."""
    buffer.permute((1, 0)).store(ds)


@gluon.jit
def multiply_s(step, at, buffers, consumer: gl.constexpr):
    """K·Qᵀ of 64 rows at D 128, in flight."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    stage, phase = stage_of(step)
    empty = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    mbarrier.wait(buffers.rows_full.index(stage), phase)
    k = buffers.k.index((at.count & 1) * 2 + consumer + zero_unknown_to_compiler(step))
    return warpgroup_mma(k, buffers.q.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def slot_before(step, at):
    """Which of the two tiles of K the block before was multiplied with."""
    return (at.count - (step == at.first).to(gl.int32)) & 1


@gluon.jit
def step_128(
    step, at, block, s, dk, dv, before, buffers, dq_lines, slope, work, span, scores,
    consumer: gl.constexpr, ADD_Q: gl.constexpr, FRESH: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """A block of 64 rows at D 128, given its S; S of the next is returned, unless it is the LAST of a tile.

    dQ is one step behind: its place is `before`. Step i writes dS(i) to stage i + 1 and has dQ(i−1) from stage i:

        issue dP(i)                    P = 2^(S − LSE) meanwhile
        issue dV += Pᵀ·dO              wait for dP and dV; dS to stage i + 1, for both consumers
        issue dQ(i−1), dK, S(i+1)      wait for dQ; the copy engine adds it up while dK and S run

    Before the first step stage 0 is given dS = 0, whose dQ goes NOWHERE; a tile's last dQ is done in the next tile's
    first step (so K has two tiles), the very last by `last_q`. dV is waited for with dP, which is faster than not to
    wait: it lets the other consumer's products through (docs/log.md).
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    dtype: gl.constexpr = buffers.k.dtype
    stage, phase = stage_of(step)
    after, phase_after = stage_of(step + 1)
    empty = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    q, do = buffers.q.index(stage), buffers.do.index(stage)
    v = buffers.v.index(consumer + zero_unknown_to_compiler(step))
    dp = warpgroup_mma(v, do.permute((1, 0)), empty, use_acc=False, is_async=True)
    masked = is_masked(block, work)
    first_key = work.first_key + consumer * ROWS
    p, slanted = probabilities(
        s, buffers.lse.index(stage).load(COLUMN), block * ROWS, first_key, masked, slope, work, span, scores, False
    )
    dv = warpgroup_mma(gl.convert_layout(p.to(dtype), OPERAND), do, dv, is_async=True)
    delta = buffers.delta.index(stage).load(COLUMN)
    dp, dv = warpgroup_mma_wait(0, deps=(dp, dv))
    if LAST:
        mbarrier.arrive(buffers.v_empty.index(consumer), count=1)
    ds = (slanted * (dp - gl.expand_dims(delta, 0))).to(dtype)
    if ADD_Q:
        mbarrier.wait(buffers.ds_empty.index(after), phase_after ^ 1)
        give(ds, buffers.ds.index(after * 2 + consumer))
        fence_async_shared()
        mbarrier.arrive(buffers.ds_full.index(after), count=1)
        mbarrier.wait(buffers.ds_full.index(stage), phase)
        dq = multiply_q(buffers, slot_before(step, at), stage, consumer, 128)
    dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, dk, is_async=True)
    if not LAST:
        s = multiply_s(step + 1, at, buffers, consumer)
    if ADD_Q:
        dq = warpgroup_mma_wait(1 if LAST else 2, deps=(dq,))
        mbarrier.arrive(buffers.ds_empty.index(stage), count=1)
        if step == at.first:
            mbarrier.arrive(buffers.k_empty.index(slot_before(step, at)), count=1)
        add_q(dq, dq_lines, before, buffers.out.index(consumer), FRESH)
    dk = warpgroup_mma_wait(0 if LAST else 1, deps=(dk,))
    mbarrier.arrive(buffers.rows_empty.index(stage), count=1)
    if not LAST:
        s = warpgroup_mma_wait(0, deps=(s,))
    return s, dk, dv


@gluon.jit
def with_alibi(s, lean, buffers):
    """S, in flight, and with near ALiBi its last step, which is a group of its own."""
    if buffers.leaning is not None:
        s = warpgroup_mma(lean, buffers.leaning.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def step_64(
    step, at, block, dk, dv, before, k, v, lean, buffers, dq_lines, slope, work, span, scores,
    consumer: gl.constexpr, ADD_Q: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """A block of 128 rows at D 64, as two parts; `k`, `v` and ALiBi's `lean` are operands in registers."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    LEANING: gl.constexpr = buffers.leaning is not None
    LATE: gl.constexpr = scores.cap is not None  # the second S: the registers do not hold both beside a softcap
    dtype: gl.constexpr = buffers.k.dtype
    stage, phase = stage_of(step)
    after, phase_after = stage_of(step + 1)
    empty = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    q0, q1 = buffers.q.index(stage * 2), buffers.q.index(stage * 2 + 1)
    do0, do1 = buffers.do.index(stage * 2), buffers.do.index(stage * 2 + 1)
    masked = is_masked(block, work)
    first_key = work.first_key + consumer * ROWS
    mbarrier.wait(buffers.rows_full.index(stage), phase)
    s0 = with_alibi(warpgroup_mma(k, q0.permute((1, 0)), empty, use_acc=False, is_async=True), lean, buffers)
    dp0 = warpgroup_mma(v, do0.permute((1, 0)), empty, use_acc=False, is_async=True)
    if not LATE:
        s1 = with_alibi(warpgroup_mma(k, q1.permute((1, 0)), empty, use_acc=False, is_async=True), lean, buffers)
    # So many younger products may still be in flight: LEANING adds one to each S, LATE moves the second S behind dV.
    s0 = warpgroup_mma_wait(2 + LEANING - LATE, deps=(s0,))
    p0, slanted0 = probabilities(
        s0, buffers.lse.index(stage * 2).load(COLUMN), block * 2 * ROWS, first_key, masked, slope, work, span, scores,
        LEANING,
    )  # fmt: skip
    dv = warpgroup_mma(gl.convert_layout(p0.to(dtype), OPERAND), do0, dv, is_async=True)
    if LATE:
        s1 = with_alibi(warpgroup_mma(k, q1.permute((1, 0)), empty, use_acc=False, is_async=True), lean, buffers)
    dp0 = warpgroup_mma_wait(2 + LEANING, deps=(dp0,))
    delta = buffers.delta.index(stage * 2).load(COLUMN)
    ds0 = (slanted0 * (dp0 - gl.expand_dims(delta, 0))).to(dtype)
    if ADD_Q:
        mbarrier.wait(buffers.ds_empty.index(after), phase_after ^ 1)
        give(ds0, buffers.ds.index((after * 2 + consumer) * 2))
    dk = warpgroup_mma(gl.convert_layout(ds0, OPERAND), q0, dk, is_async=True)
    dp1 = warpgroup_mma(v, do1.permute((1, 0)), empty, use_acc=False, is_async=True)
    s1 = warpgroup_mma_wait(3 - LATE, deps=(s1,))
    p1, slanted1 = probabilities(
        s1, buffers.lse.index(stage * 2 + 1).load(COLUMN), block * 2 * ROWS + ROWS, first_key, masked, slope, work,
        span, scores, LEANING,
    )  # fmt: skip
    dv = warpgroup_mma(gl.convert_layout(p1.to(dtype), OPERAND), do1, dv, is_async=True)
    dp1 = warpgroup_mma_wait(1, deps=(dp1,))
    delta = buffers.delta.index(stage * 2 + 1).load(COLUMN)
    ds1 = (slanted1 * (dp1 - gl.expand_dims(delta, 0))).to(dtype)
    if ADD_Q:
        give(ds1, buffers.ds.index((after * 2 + consumer) * 2 + 1))
        fence_async_shared()
        mbarrier.arrive(buffers.ds_full.index(after), count=1)
    dk = warpgroup_mma(gl.convert_layout(ds1, OPERAND), q1, dk, is_async=True)
    if ADD_Q:
        mbarrier.wait(buffers.ds_full.index(stage), phase)
        dq = multiply_q(buffers, slot_before(step, at), stage, consumer, 64)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(buffers.ds_empty.index(stage), count=1)
        if step == at.first:
            mbarrier.arrive(buffers.k_empty.index(slot_before(step, at)), count=1)
        add_q(dq, dq_lines, before, buffers.out.index(consumer), FRESH)
    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    mbarrier.arrive(buffers.rows_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def consume(
    dq_lines, dk_tiles, dv_tiles, dk_out, dv_out, dk_strides, dv_strides, buffers, places, span, scores,
    gradient_scale, room, batches, heads, kv_heads, group, together,
    consumer: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, ADD_Q: gl.constexpr,
    ALONE: gl.constexpr, FRESH: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Its 64 keys of tile after tile, over all rows that see them."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    ROW_PARTS: gl.constexpr = 128 // BLOCK_DIM
    SIZE: gl.constexpr = ROW_PARTS * ROWS
    dtype: gl.constexpr = buffers.k.dtype
    if ADD_Q:  # dQ of the block before the first is that of dS = 0, and goes NOWHERE
        for i in gl.static_range(ROW_PARTS):
            give(gl.zeros([ROWS, ROWS], dtype, LAYOUT), buffers.ds.index(consumer * ROW_PARTS + i))
        fence_async_shared()
        mbarrier.arrive(buffers.ds_full.index(0), count=1)
    blocks = blocks_of(places, span, KEYS)
    tiles = blocks * batches * kv_heads
    tile = gl.program_id(0) * (blocks if ALONE else 1)
    count = 0
    step = 0
    before = NOWHERE
    while tile < tiles:
        work = work_of(tile, places, span, batches, kv_heads, together, KEYS, SIZE)
        dk = gl.zeros([ROWS, BLOCK_DIM], gl.float32, SUMS)
        dv = gl.zeros([ROWS, BLOCK_DIM], gl.float32, SUMS)
        head = work.kv_head * group
        first = first_block(work, KEYS, APART)
        block = first
        # Tiles of 64 × 64: D 128 has two beside each other, D 64 two one below the other.
        line = ((work.batch * heads + head) * room + work.line) // SIZE
        place = (line + block) * 2 + consumer
        slope, lean = slope_of(scores, work, buffers, heads, head)
        at = Steps(count, gl.where(count > 0, step, -1), step + (work.end - work.begin) * group - 1)
        slot, phase = stage_of(count)
        mbarrier.wait(buffers.k_full.index(slot), phase)
        if BLOCK_DIM == 128:
            s = multiply_s(step, at, buffers, consumer)
            s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.wait(buffers.v_full.index(consumer), count & 1)
        if BLOCK_DIM == 64:
            v = buffers.v.index(consumer).load(OPERAND)
            k = buffers.k.index((count & 1) * 2 + consumer).load(OPERAND)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(buffers.v_empty.index(consumer), count=1)
        for now in range(step, at.last + (0 if BLOCK_DIM == 128 else 1)):
            block, head, place, slope, lean = go_round(
                block, head, place, slope, lean, first, now > step, work, scores, buffers, heads, room // SIZE, group,
                APART,
            )  # fmt: skip
            if BLOCK_DIM == 128:
                s, dk, dv = step_128(
                    now, at, block, s, dk, dv, before, buffers, dq_lines, slope, work, span, scores, consumer, ADD_Q,
                    FRESH, False,
                )  # fmt: skip
            else:
                dk, dv = step_64(
                    now, at, block, dk, dv, before, k, v, lean, buffers, dq_lines, slope, work, span, scores,
                    consumer, ADD_Q, FRESH,
                )  # fmt: skip
            before = place_of_sums(place, work, FRESH)
            block += 1
            place += 2
        if BLOCK_DIM == 128:
            block, head, place, slope, lean = go_round(
                block, head, place, slope, lean, first, at.last > step, work, scores, buffers, heads, room // SIZE,
                group, APART,
            )  # fmt: skip
            s, dk, dv = step_128(
                at.last, at, block, s, dk, dv, before, buffers, dq_lines, slope, work, span, scores, consumer, ADD_Q,
                FRESH, True,
            )  # fmt: skip
            before = place_of_sums(place, work, FRESH)
        step = at.last + 1
        if not ADD_Q:
            mbarrier.arrive(buffers.k_empty.index(slot), count=1)
        rows_at = work.batch, work.kv_head, work.before_k, work.first_key + consumer * ROWS, work.len_k
        LEAVING: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DIM], dtype)
        out = reinterpret(buffers.out.index(consumer), dtype, [ROW_PARTS, ROWS, BLOCK_DIM], LEAVING)
        PACKED: gl.constexpr = places is not None
        if ALONE:
            stores_done()  # the next tile adds to the same dQ
        write(dv_tiles, dv_out, dv_strides, dv, rows_at, out.index(0), PACKED, VALUE_DIM)
        write(dk_tiles, dk_out, dk_strides, dk * gradient_scale, rows_at, out.index(ROW_PARTS - 1), PACKED, DIM)
        tile = next_tile(buffers, count)
        count += 1
    if ADD_Q and step > 0:
        dq = last_q(step, (count - 1) & 1, buffers, consumer, BLOCK_DIM)
        add_q(dq, dq_lines, before, buffers.out.index(consumer), FRESH)
    tma.store_wait(0)


@gluon.jit
def go_round(
    block, head, place, slope, lean, first, begun, work, scores, buffers, heads, blocks, group, APART: gl.constexpr
):  # fmt: skip
    """After the last block of rows comes the first; after all, those of the group's next query head, `blocks` on."""
    if APART or group != 1:  # noqa: SIM102 - known when this is compiled
        if block == work.end:
            block = work.begin
            place -= (work.end - work.begin) * 2
    if group != 1:  # noqa: SIM102
        if begun & (block == first):
            head += 1
            place += blocks * 2
            slope, lean = slope_of(scores, work, buffers, heads, head)
    return block, head, place, slope, lean


@gluon.jit
def slope_of(scores, work, buffers, heads, head):
    """ALiBi's slope in units of log₂, and the operand for `with_alibi`; 0 without."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    slope = 0.0
    lean = 0.0
    if scores.slopes is not None:
        slope = gl.load(scores.slopes + work.sequence * heads + head) * LOG2_E
    if buffers.leaning is not None:
        slope = bounded(slope, scores)
        lean = lean_of_keys(slope, scores, buffers.k.dtype, gl.DotOperandLayout(0, LAYOUT, 2))
    return slope, lean


@gluon.jit
def attention_backward_hopper(
    q_tiles, k_tiles, v_tiles, do_tiles, lse_lines, delta_lines, dq_lines, dk_tiles, dv_tiles, dk_out, dv_out,
    dk_strides, dv_strides, counter, places, span, scores, gradient_scale, room, batches, heads, kv_heads, group,
    together,
    DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, ADD_Q: gl.constexpr,
    ALONE: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as run at once. `counter` is 0 before and after; `places` is None, or see `blocks_of`.

    Lines of a head are `room` long; `dq_lines` are of […, 256] numbers; for `together` see `work_of`. ALONE: a CTA
    takes all keys of a head, one tile after the other, so that its dQ is added up in one order. FRESH, too: what was in
    `dq_lines` does not count, and all blocks of rows see the first tile.
    """
    dtype: gl.constexpr = q_tiles.dtype
    ROW_PARTS: gl.constexpr = 128 // BLOCK_DIM
    ALL_SEE: gl.constexpr = span.left is None and span.right is None
    APART: gl.constexpr = ADD_Q and not ALONE and BLOCK_DIM == 128 and ALL_SEE  # at D 64 it gains nothing
    LEANING: gl.constexpr = scores.near is not None and scores.cap is None and BLOCK_DIM == 64
    buffers = Buffers(
        q=shared(dtype, STAGES * ROW_PARTS, ROWS, BLOCK_DIM),
        do=shared(dtype, STAGES * ROW_PARTS, ROWS, BLOCK_DIM),
        lse=lines(STAGES * ROW_PARTS, ROWS),
        delta=lines(STAGES * ROW_PARTS, ROWS),
        k=shared(dtype, 2 * STAGES, ROWS, BLOCK_DIM),
        v=shared(dtype, 2, ROWS, BLOCK_DIM),
        ds=shared(dtype, STAGES * 2 * ROW_PARTS if ADD_Q else 1, ROWS, ROWS),
        out=shared(dtype, 2, ROW_PARTS * ROWS, BLOCK_DIM),
        k_full=barriers(STAGES, 2),
        k_empty=barriers(STAGES, 2),
        v_full=barriers(2, 1),
        v_empty=barriers(2, 1),
        rows_full=barriers(STAGES, 4 * ROW_PARTS),
        rows_empty=barriers(STAGES, 2),
        ds_full=barriers(STAGES, 2) if ADD_Q else None,
        ds_empty=barriers(STAGES, 2) if ADD_Q else None,
        leaning=leaning_rows(dtype) if LEANING else None,
        raw=None if places is None else barriers(1, 1).index(0),
        next=numbers(2),
        next_full=barriers(2, 1),
        next_empty=barriers(2, 2),
    )
    fence_async_shared()  # what threads wrote so far, the copy engine and the tensor cores may see
    gl.warp_specialize(
        [
            (produce, (q_tiles, do_tiles, k_tiles, v_tiles, lse_lines, delta_lines, counter, buffers, places, span,
                       room, batches, heads, kv_heads, group, together, ROW_PARTS, ALONE, APART)),
            (consume, (dq_lines, dk_tiles, dv_tiles, dk_out, dv_out, dk_strides, dv_strides, buffers, places, span,
                       scores, gradient_scale, room, batches, heads, kv_heads, group, together, 0, DIM, VALUE_DIM,
                       BLOCK_DIM, ADD_Q, ALONE, FRESH, APART)),
            (consume, (dq_lines, dk_tiles, dv_tiles, dk_out, dv_out, dk_strides, dv_strides, buffers, places, span,
                       scores, gradient_scale, room, batches, heads, kv_heads, group, together, 1, DIM, VALUE_DIM,
                       BLOCK_DIM, ADD_Q, ALONE, FRESH, APART)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
