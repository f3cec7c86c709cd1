"""Forward on Hopper in FP8: the warps of `hopper_forward`, products of 8-bit numbers at twice the rate.

Q, K and V come quantised, each block with its scale, V as (D, keys) since the tensor cores take 8-bit operands along
their sums only. The scales of Q and K join that of the scores; that of V joins P, as a shift of its exponent, so that
one scale is left for the output. P is made as large as its format takes.

P is E4M3 whatever the format of V. P·V wants it in other threads than Q·Kᵀ leaves the scores in, four neighbours to a
thread instead of two. But the order of the keys is free where they are summed up: V comes with its keys in the order in
which the threads hold P (`in_thread_order`), and nothing is moved.
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
from assay.flash.kernels.hopper_fragments import by_row
from assay.flash.kernels.hopper_queue import claim_tile, next_tile, numbers
from assay.flash.kernels.hopper_rows import CONSUMERS, blocks_of, seen, work_of
from assay.flash.kernels.hopper_shared import (
    LN_2,
    LOG2_E,
    ROWS,
    barriers,
    partial_sums,
    shared,
    tanh,
    write,
)

LARGEST_P = gl.constexpr(8)  # P's largest value is 2 to this


class Scales(NamedTuple):
    """What a number in FP8 stands for, by block of rows or keys: (B, H, blocks), powers of two."""

    q: Any
    k: Any
    v: Any
    v_largest: Any
    """(B, H_kv): of all blocks."""
    q_blocks: Any
    """Blocks of a head."""
    k_blocks: Any


class Rows(NamedTuple):
    """What stays the same for 64 rows over all their blocks of keys."""

    rows: Any
    columns: Any
    unit: Any
    """Of the scores, before the scale of K."""
    kv_place: Any
    """Where the scales of this head's K and V begin."""
    v_largest: Any


class State(NamedTuple):
    """What goes from block to block."""

    p: Any
    """Of the block before: it waits for its product with V."""
    output: Any
    maximum: Any
    row_sum: Any
    factor: Any
    """TWO_LEVEL: what the output is still to be multiplied by, when that product is added to it."""


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
    next: Any
    """The number of the next tile, from the producer to the consumers."""
    next_full: Any
    next_empty: Any


@gluon.jit
def produce(q_tiles, k_tiles, v_tiles, counter, buffers, span, batches, heads, group):
    """Tile after tile: Q, then K and V block by block, each into the stage that the consumers left longest ago."""
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    STAGES: gl.constexpr = buffers.k.shape[0]
    tiles = blocks_of(None, span) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    while tile < tiles:
        work = work_of(tile, None, span, batches, heads, group, COLUMNS)
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(buffers.q_empty.index(consumer), (count & 1) ^ 1)
            mbarrier.expect(buffers.q_full.index(consumer), q_tiles.block_type.nbytes)
            place = [work.batch, work.head, work.first_row + consumer * ROWS, 0]
            copy_in(q_tiles, place, buffers.q_full.index(consumer), buffers.q.index(consumer))
        for back in range(work.end - work.begin):
            start = (work.end - 1 - back) * COLUMNS
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            k_full, v_full = buffers.k_full.index(stage), buffers.v_full.index(stage)
            mbarrier.wait(buffers.k_empty.index(stage), phase)
            mbarrier.expect(k_full, k_tiles.block_type.nbytes)
            place = [work.batch, work.kv_head, start, 0]
            copy_in(k_tiles, place, k_full, buffers.k.index(stage))
            mbarrier.wait(buffers.v_empty.index(stage), phase)
            mbarrier.expect(v_full, v_tiles.block_type.nbytes)
            place = [work.batch, work.kv_head, 0, start]
            copy_in(v_tiles, place, v_full, buffers.v.index(stage))
            step += 1
        tile = claim_tile(counter, buffers, count)
        count += 1


@gluon.jit
def in_thread_order(p):
    """P with its keys in the order in which a thread that holds the scores can multiply them.

    Of 16 keys thread t of four has 2t, 2t + 1, 8 + 2t and 8 + 2t + 1; the product wants its 4t … 4t + 3. So place
    4t + 2 · half + j has key 8 · half + 2t + j.
    """
    rows: gl.constexpr = p.shape[0]
    keys: gl.constexpr = p.shape[1]
    p = gl.reshape(p, [rows, keys // 16, 2, 4, 2])
    return gl.reshape(gl.permute(p, [0, 1, 3, 2, 4]), [rows, keys])


@gluon.jit
def fours(p, LAYOUT: gl.constexpr):
    """P in E4M3, four numbers to a register."""
    p = gl.convert_layout(in_thread_order(p), LAYOUT, assert_trivial=True)
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    CAST: gl.constexpr = """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }"""
    numbers = [first, second, third, fourth]
    return gl.inline_asm_elementwise(CAST, "=r,f,f,f,f", numbers, dtype=gl.uint32, is_pure=True, pack=1)


@gluon.jit
def ones(p, LAYOUT: gl.constexpr):
    """What `fours` put together: names for the parts, no instruction."""
    first = (p & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
    second = ((p >> 8) & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
    third = ((p >> 16) & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
    fourth = (p >> 24).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
    numbers = gl.join(gl.join(first, third), gl.join(second, fourth))
    return gl.convert_layout(gl.reshape(numbers, [p.shape[0], p.shape[1] * 4]), LAYOUT, assert_trivial=True)


@gluon.jit
def row_maxima(s):
    """Of pairs of columns first: those do not wait for each other."""
    left, right = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    return gl.convert_layout(gl.max(gl.maximum(left, right), 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def softmax(s, state, block, unit, shift, tile, work, span, scores, MASKED: gl.constexpr):
    """One block's scores → P times 2 to the `shift`, the new maximum and row sum, the factor for what came before."""
    if scores.cap is not None:
        s = tanh(s * unit)
        unit = scores.cap
    if MASKED:
        s = gl.where(seen(tile.rows, block * s.shape[1] + tile.columns, work, span), s, float("-inf"))
    latest = gl.maximum(state.maximum, row_maxima(s) * unit)
    reference = latest
    if MASKED:
        reference = gl.where(latest == float("-inf"), 0.0, latest)
    p = gl.exp2(s * unit - gl.expand_dims(reference - shift, 1))
    factor = gl.exp2(state.maximum - reference)
    return p, latest, by_row(state.row_sum, factor) + partial_sums(p) * gl.exp2(-shift), factor


@gluon.jit
def block_scales(tile, scales, block):
    """The unit of a block's scores, and by how much the exponent of P is shifted. Scales are powers of two."""
    unit = tile.unit * gl.load(scales.k + tile.kv_place + block)
    v_scale = gl.load(scales.v + tile.kv_place + block)
    steps = (v_scale.to(gl.int32, bitcast=True) - tile.v_largest.to(gl.int32, bitcast=True)) >> 23
    return unit, (LARGEST_P + steps).to(gl.float32)


@gluon.jit
def over_blocks(
    first, last, earlier, q, state, tile, buffers, work, span, scores, scales,
    MASKED: gl.constexpr, TWO_LEVEL: gl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last`, counted from the right; `earlier` is how many came before this tile."""
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    STAGES: gl.constexpr = buffers.k.shape[0]
    BLOCK_VALUE_DIM: gl.constexpr = buffers.v.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    O_LAYOUT: gl.constexpr = state.output.type.layout
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    for back in range(first, last):
        step = earlier + back
        before, stage = (step - 1) % STAGES, step % STAGES
        block = work.end - 1 - back
        unit, shift = block_scales(tile, scales, block)
        p = ones(state.p, P_LAYOUT)
        mbarrier.wait(buffers.k_full.index(stage), (step // STAGES) & 1)
        empty = gl.zeros([ROWS, COLUMNS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.wait(buffers.v_full.index(before), ((step - 1) // STAGES) & 1)
        values = buffers.v.index(before).permute((1, 0))
        if TWO_LEVEL:
            nothing = gl.zeros([ROWS, BLOCK_VALUE_DIM], gl.float32, O_LAYOUT)
            product = warpgroup_mma(p, values, nothing, use_acc=False, is_async=True)
        else:
            product = warpgroup_mma(p, values, state.output, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(buffers.k_empty.index(stage), count=1)
        exps, maximum, row_sum, factor = softmax(s, state, block, unit, shift, tile, work, span, scores, MASKED)
        if BLOCK_VALUE_DIM <= 128:
            # It is full, and this waits for nothing; but instructions stay on their side of it, and the softmax is not
            # put behind the product. At D_v 256, where the products fill the time, it is better there.
            mbarrier.wait(buffers.v_full.index(before), ((step - 1) // STAGES) & 1)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(buffers.v_empty.index(before), count=1)
        if TWO_LEVEL:
            output = by_row(state.output, state.factor) + product
        else:
            output = by_row(product, factor)
        state = State(fours(exps, P_LAYOUT), output, maximum, row_sum, factor)
    return state


@gluon.jit
def consume(
    out_tiles, out, out_strides, lse, sinks, span, scores, scales, batches, heads, group, buffers,
    consumer: gl.constexpr, VALUE_DIM: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, TWO_LEVEL: gl.constexpr,
):  # fmt: skip
    """Its 64 rows of tile after tile."""
    tiles = blocks_of(None, span) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    while tile < tiles:
        work = work_of(tile, None, span, batches, heads, group, buffers.k.shape[1])
        attend(
            out_tiles, out, out_strides, lse, sinks, span, scores, scales, heads, group, buffers, work, count, step,
            consumer, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL,
        )  # fmt: skip
        step += work.end - work.begin
        tile = next_tile(buffers, count)
        count += 1
    tma.store_wait(0)


@gluon.jit
def attend(
    out_tiles, out, out_strides, lse, sinks, span, scores, scales, heads, group, buffers, work, count, earlier,
    consumer: gl.constexpr, VALUE_DIM: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, TWO_LEVEL: gl.constexpr,
):  # fmt: skip
    """64 rows over all their blocks of keys; `earlier` is how many blocks came before this tile, the count-th."""
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    STAGES: gl.constexpr = buffers.k.shape[0]
    BLOCK_VALUE_DIM: gl.constexpr = buffers.v.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_VALUE_DIM, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    rows = work.first_row + consumer * ROWS + gl.arange(0, ROWS, ROW_LAYOUT)
    kv_head = work.batch * (heads // group) + work.kv_head
    q_place = (work.batch * heads + work.head) * scales.q_blocks + work.first_row // (ROWS * CONSUMERS)
    tile = Rows(
        rows,
        gl.arange(0, COLUMNS, gl.SliceLayout(0, S_LAYOUT)),
        scores.scale * gl.load(scales.q + q_place),
        kv_head * scales.k_blocks,
        gl.load(scales.v_largest + kv_head),
    )
    one = gl.full([ROWS], 1.0, gl.float32, ROW_LAYOUT)
    output = gl.zeros([ROWS, BLOCK_VALUE_DIM], gl.float32, O_LAYOUT)
    empty = gl.zeros([ROWS, COLUMNS], gl.float32, S_LAYOUT)
    sums = partial_sums(empty)
    if sinks is None:
        state = State(0, output, one * float("-inf"), sums, one)
    else:  # one more key, which has no value: 1, as four threads' partial sums
        state = State(0, output, one * (gl.load(sinks + work.head).to(gl.float32) * LOG2_E), sums + 0.25, one)
    block = work.end - 1
    unit, shift = block_scales(tile, scales, block)

    mbarrier.wait(buffers.q_full.index(consumer), count & 1)
    q = buffers.q.index(consumer)
    if Q_IN_REGISTERS:
        q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 4))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(buffers.q_empty.index(consumer), count=1)
    stage = earlier % STAGES
    mbarrier.wait(buffers.k_full.index(stage), (earlier // STAGES) & 1)
    s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(buffers.k_empty.index(stage), count=1)
    exps, maximum, row_sum, _ = softmax(s, state, block, unit, shift, tile, work, span, scores, True)
    state = State(fours(exps, P_LAYOUT), output, maximum, row_sum, one)
    right = gl.maximum(work.end - work.whole_end, 1)
    left = gl.maximum(work.end - work.whole_begin, right)
    state = over_blocks(1, right, earlier, q, state, tile, buffers, work, span, scores, scales, True, TWO_LEVEL)
    state = over_blocks(right, left, earlier, q, state, tile, buffers, work, span, scores, scales, False, TWO_LEVEL)
    if span.left is not None:
        state = over_blocks(
            left, work.end - work.begin, earlier, q, state, tile, buffers, work, span, scores, scales, True, TWO_LEVEL
        )
    if not Q_IN_REGISTERS:
        mbarrier.arrive(buffers.q_empty.index(consumer), count=1)
    step = earlier + work.end - work.begin - 1
    mbarrier.wait(buffers.v_full.index(step % STAGES), (step // STAGES) & 1)
    values = buffers.v.index(step % STAGES).permute((1, 0))
    if TWO_LEVEL:
        nothing = gl.zeros([ROWS, BLOCK_VALUE_DIM], gl.float32, O_LAYOUT)
        product = warpgroup_mma(ones(state.p, P_LAYOUT), values, nothing, use_acc=False)
        output = by_row(state.output, state.factor) + product
    else:
        output = warpgroup_mma(ones(state.p, P_LAYOUT), values, state.output)
    mbarrier.arrive(buffers.v_empty.index(step % STAGES), count=1)

    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), ROW_LAYOUT)
    inverse = tile.v_largest * gl.exp2(-1.0 * LARGEST_P) / gl.where(row_sum == 0.0, 1.0, row_sum)
    place = (work.batch * heads + work.head).to(gl.int64) * span.queries
    gl.store(lse + place + rows, (state.maximum + gl.log2(row_sum)) * LN_2, mask=rows < work.len_q)
    rows_at = work.batch, work.head, 0, work.first_row + consumer * ROWS, work.len_q
    buffer = buffers.out.index(consumer)
    write(out_tiles, out, out_strides, by_row(output, inverse), rows_at, buffer, False, VALUE_DIM)


@gluon.jit
def attention_forward_fp8_hopper(
    q_tiles, k_tiles, v_tiles, out_tiles, out, out_strides, lse, sinks, counter, span, scores, scales, batches, heads,
    group,
    VALUE_DIM: gl.constexpr, STAGES: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, TWO_LEVEL: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as run at once. `counter` is 0 at the start."""
    COLUMNS: gl.constexpr = k_tiles.block_type.shape[2]
    DIM: gl.constexpr = k_tiles.block_type.shape[3]
    BLOCK_VALUE_DIM: gl.constexpr = v_tiles.block_type.shape[2]
    buffers = Buffers(
        q=shared(q_tiles.dtype, CONSUMERS, ROWS, DIM),
        out=shared(out.dtype.element_ty, CONSUMERS, ROWS, BLOCK_VALUE_DIM),
        k=shared(k_tiles.dtype, STAGES, COLUMNS, DIM),
        v=shared(v_tiles.dtype, STAGES, BLOCK_VALUE_DIM, COLUMNS),
        q_full=barriers(CONSUMERS, 1),
        q_empty=barriers(CONSUMERS, 1),
        k_full=barriers(STAGES, 1),
        k_empty=barriers(STAGES, CONSUMERS),
        v_full=barriers(STAGES, 1),
        v_empty=barriers(STAGES, CONSUMERS),
        next=numbers(2),
        next_full=barriers(2, 1),
        next_empty=barriers(2, CONSUMERS),
    )
    fence_async_shared()  # what threads wrote so far, the copy engine and the tensor cores may see
    gl.warp_specialize(
        [
            (produce, (q_tiles, k_tiles, v_tiles, counter, buffers, span, batches, heads, group)),
            (consume, (out_tiles, out, out_strides, lse, sinks, span, scores, scales, batches, heads, group, buffers,
                       0, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL)),
            (consume, (out_tiles, out, out_strides, lse, sinks, span, scores, scales, batches, heads, group, buffers,
                       1, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
