"""Forward on Hopper in FP8: the warps of `hopper_forward`, products of 8-bit numbers at twice the rate.

Q, K and V come quantised, each block with its scale, V as (D, keys) since the tensor cores take 8-bit operands along
their sums only. The scales of Q and K join that of the scores; the output is in units of the scale of V's latest
block. P is made as large as its format takes, without exponentials: see `hopper_fp8_softmax`. The row sum is that of
these P, by one more product with a matrix of ones, so that what they have in common cancels.

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
from assay.flash.kernels.hopper_fp8_softmax import LARGEST_P, fours, singles, softmax
from assay.flash.kernels.hopper_fragments import by_row, rescaled
from assay.flash.kernels.hopper_queue import claim_tile, next_tile, numbers
from assay.flash.kernels.hopper_rows import blocks_of, work_of
from assay.flash.kernels.hopper_shared import (
    LN_2,
    LOG2_E,
    ROWS,
    barriers,
    shared,
    stage_of,
    write,
)

ONE = gl.constexpr(0x38)  # in E4M3
SUMS = gl.constexpr(8)  # columns of the row sums, all alike: the fewest that a product has
LEAST_SCALE = gl.constexpr(2.0**-80)  # of a block of V, times the largest: what is below adds nothing in FP32


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
    v_least: Any
    """The smallest scale of V that counts."""


class State(NamedTuple):
    """What goes from block to block."""

    p: Any
    """Of the block before: it waits for its product with V."""
    output: Any
    maximum: Any
    reference: Any
    """What P is relative to."""
    largest: Any
    """No score was larger, nor -score: by the scales alone."""
    row_sum: Any
    """(rows, SUMS), all columns alike."""
    factor: Any
    """TWO_LEVEL: what output and row sum are still to be multiplied by, when those of that block are added."""
    v_ratio: Any
    """TWO_LEVEL: the same for the output alone: the scale of V that it is in, over that of the block before."""
    v_scale: Any
    """Of the block before."""


class Buffers(NamedTuple):
    """Shared memory and the barriers that say when it is full and when it may be written again."""

    q: Any
    out: Any
    k: Any
    v: Any
    ones: Any
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


@gluon.constexpr_function
def together(consumers):
    """Heads whose tiles go together. Of three consumers, whose tiles are long, the last are short only if many do."""
    return 16 if consumers == 3 else 4


@gluon.jit
def produce(given):
    """Tile after tile: Q, then K and V block by block, each into the stage that the consumers left longest ago."""
    q_tiles, k_tiles, v_tiles, counter, buffers, span, batches, heads, group = given
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    STAGES: gl.constexpr = buffers.k.shape[0]
    CONSUMERS: gl.constexpr = buffers.q.shape[0]
    tiles = blocks_of(None, span, ROWS * CONSUMERS) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    while tile < tiles:
        work = work_of(tile, None, span, batches, heads, group, ROWS * CONSUMERS, COLUMNS, together(CONSUMERS))
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(buffers.q_empty.index(consumer), (count & 1) ^ 1)
            mbarrier.expect(buffers.q_full.index(consumer), q_tiles.block_type.nbytes)
            place = [work.batch, work.head, work.first_row + consumer * ROWS, 0]
            copy_in(q_tiles, place, buffers.q_full.index(consumer), buffers.q.index(consumer))
        for back in range(work.end - work.begin):
            start = (work.end - 1 - back) * COLUMNS
            stage, phase = stage_of(step, STAGES)
            k_full, v_full = buffers.k_full.index(stage), buffers.v_full.index(stage)
            mbarrier.wait(buffers.k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full, k_tiles.block_type.nbytes)
            place = [work.batch, work.kv_head, start, 0]
            copy_in(k_tiles, place, k_full, buffers.k.index(stage))
            mbarrier.wait(buffers.v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full, v_tiles.block_type.nbytes)
            place = [work.batch, work.kv_head, 0, start]
            copy_in(v_tiles, place, v_full, buffers.v.index(stage))
            step += 1
        tile = claim_tile(counter, buffers, count)
        count += 1


@gluon.jit
def block_scales(tile, scales, block):
    """The unit of a block's scores and the scale of its V."""
    k_scale = gl.load(scales.k + tile.kv_place + block)
    v_scale = gl.maximum(gl.load(scales.v + tile.kv_place + block), tile.v_least)
    return tile.unit * k_scale, v_scale


@gluon.jit
def ratio(one, other):
    """Any number over a power of two."""
    steps = 0x3F800000 - other.to(gl.int32, bitcast=True)
    return (one.to(gl.int32, bitcast=True) + steps).to(gl.float32, bitcast=True)


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
        stage, phase = stage_of(earlier + back, STAGES)
        before, phase_before = stage_of(earlier + back - 1, STAGES)
        block = work.end - 1 - back
        unit, v_scale = block_scales(tile, scales, block)
        p = singles(state.p, P_LAYOUT)
        mbarrier.wait(buffers.v_full.index(before), phase_before)
        values = buffers.v.index(before).permute((1, 0))
        if TWO_LEVEL:
            nothing = gl.zeros([ROWS, BLOCK_VALUE_DIM], gl.float32, O_LAYOUT)
            product = warpgroup_mma(p, values, nothing, use_acc=False, is_async=True)
        else:
            product = warpgroup_mma(p, values, state.output, is_async=True)
        sums = row_sums(p, buffers)
        # All products of a turn in a row, waited for together: the other consumers make their P meanwhile.
        mbarrier.wait(buffers.k_full.index(stage), phase)
        empty = gl.zeros([ROWS, COLUMNS], gl.float16, S_LAYOUT)
        s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), empty, use_acc=False)
        product, sums = warpgroup_mma_wait(0, deps=(product, sums))
        mbarrier.arrive(buffers.k_empty.index(stage), count=1)
        mbarrier.arrive(buffers.v_empty.index(before), count=1)
        halves, maximum, reference, largest, factor = softmax(
            s, state, block, unit, tile, work, span, scores, P_LAYOUT, MASKED
        )
        v_ratio = ratio(state.v_scale, v_scale)
        if TWO_LEVEL:
            output = by_row(state.output, state.factor * state.v_ratio) + product
            row_sum = by_row(state.row_sum, state.factor) + sums
        else:
            output = rescaled(product, factor * v_ratio)
            row_sum = by_row(state.row_sum + sums, factor)
        state = State(fours(halves), output, maximum, reference, largest, row_sum, factor, v_ratio, v_scale)
    return state


@gluon.jit
def row_sums(p, buffers):
    """(rows, SUMS): a block's, by the tensor cores. They keep 14 bits: blocks are summed up elsewhere."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 32])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)
    nothing = gl.zeros([ROWS, SUMS], gl.float32, LAYOUT)
    return warpgroup_mma(p, buffers.ones.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def consume(
    given, consumer: gl.constexpr, VALUE_DIM: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, TWO_LEVEL: gl.constexpr
):  # fmt: skip
    """Its 64 rows of tile after tile."""
    out_tiles, out, out_strides, lse, sinks, span, scores, scales, centres, batches, heads, group, buffers = given
    CONSUMERS: gl.constexpr = buffers.q.shape[0]
    tiles = blocks_of(None, span, ROWS * CONSUMERS) * batches * heads
    tile = gl.program_id(0)
    count = 0
    step = 0
    while tile < tiles:
        COLUMNS: gl.constexpr = buffers.k.shape[1]
        work = work_of(tile, None, span, batches, heads, group, ROWS * CONSUMERS, COLUMNS, together(CONSUMERS))
        attend(
            out_tiles, out, out_strides, lse, sinks, span, scores, scales, centres, heads, group, buffers, work, count,
            step, consumer, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL,
        )  # fmt: skip
        step += work.end - work.begin
        tile = next_tile(buffers, count)
        count += 1
    tma.store_wait(0)


@gluon.jit
def attend(
    out_tiles, out, out_strides, lse, sinks, span, scores, scales, centres, heads, group, buffers, work, count, earlier,
    consumer: gl.constexpr, VALUE_DIM: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, TWO_LEVEL: gl.constexpr,
):  # fmt: skip
    """64 rows over all their blocks of keys; `earlier` is how many blocks came before this tile, the count-th."""
    COLUMNS: gl.constexpr = buffers.k.shape[1]
    STAGES: gl.constexpr = buffers.k.shape[0]
    BLOCK_VALUE_DIM: gl.constexpr = buffers.v.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_VALUE_DIM, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 32])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    rows = work.first_row + consumer * ROWS + gl.arange(0, ROWS, ROW_LAYOUT)
    kv_head = work.batch * (heads // group) + work.kv_head
    q_place = (work.batch * heads + work.head) * scales.q_blocks
    if buffers.q.shape[0] == 2:
        q_place += work.first_row // COLUMNS
    else:
        q_place += gl.minimum((work.first_row + consumer * ROWS) // COLUMNS, scales.q_blocks - 1)
    unit = scores.scale * gl.load(scales.q + q_place)
    tile = Rows(
        rows,
        gl.arange(0, COLUMNS, gl.SliceLayout(0, S_LAYOUT)),
        unit,
        kv_head * scales.k_blocks,
        gl.load(scales.v_largest + kv_head) * LEAST_SCALE,
    )
    one = gl.full([ROWS], 1.0, gl.float32, ROW_LAYOUT)
    output = gl.zeros([ROWS, BLOCK_VALUE_DIM], gl.float32, O_LAYOUT)
    empty = gl.zeros([ROWS, COLUMNS], gl.float16, S_LAYOUT)
    row_sum = gl.zeros([ROWS, SUMS], gl.float32, SUM_LAYOUT)
    maximum = one * float("-inf")
    largest = 0.0
    if sinks is not None:  # one more key, which has no value
        sink = gl.load(sinks + work.head).to(gl.float32) * LOG2_E
        maximum = one * sink
        largest = gl.abs(sink)
        row_sum += 2.0**LARGEST_P
    block = work.end - 1
    unit, v_scale = block_scales(tile, scales, block)
    state = State(None, output, maximum, maximum, largest, row_sum, one, 1.0, v_scale)

    mbarrier.wait(buffers.q_full.index(consumer), count & 1)
    q = buffers.q.index(consumer)
    if Q_IN_REGISTERS:
        q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 4))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(buffers.q_empty.index(consumer), count=1)
    stage, phase = stage_of(earlier, STAGES)
    mbarrier.wait(buffers.k_full.index(stage), phase)
    s = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), empty, use_acc=False)
    mbarrier.arrive(buffers.k_empty.index(stage), count=1)
    halves, maximum, reference, largest, factor = softmax(
        s, state, block, unit, tile, work, span, scores, P_LAYOUT, True
    )
    row_sum = by_row(row_sum, factor)
    state = State(fours(halves), output, maximum, reference, largest, row_sum, one, 1.0, v_scale)
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
    stage, phase = stage_of(earlier + work.end - work.begin - 1, STAGES)
    mbarrier.wait(buffers.v_full.index(stage), phase)
    values = buffers.v.index(stage).permute((1, 0))
    p = singles(state.p, P_LAYOUT)
    output, row_sum = state.output, state.row_sum
    others = row_sum
    if TWO_LEVEL:
        nothing = gl.zeros([ROWS, BLOCK_VALUE_DIM], gl.float32, O_LAYOUT)
        product = warpgroup_mma(p, values, nothing, use_acc=False, is_async=True)
        output = by_row(output, state.factor * state.v_ratio)
        sums = row_sums(p, buffers)
        product, sums = warpgroup_mma_wait(0, deps=(product, sums))
        output += product
        row_sum = by_row(row_sum, state.factor) + sums
    else:
        product = warpgroup_mma(p, values, output, is_async=True)
        sums = row_sums(p, buffers)
        output, sums = warpgroup_mma_wait(0, deps=(product, sums))
        row_sum += sums
    mbarrier.arrive(buffers.v_empty.index(stage), count=1)

    row_sum = gl.convert_layout(gl.max(row_sum, 1), ROW_LAYOUT)
    inverse = state.v_scale / gl.where(row_sum == 0.0, 1.0, row_sum)
    place = (work.batch * heads + work.head).to(gl.int64) * span.queries
    gl.store(lse + place + rows, (state.reference + gl.log2(row_sum) - LARGEST_P) * LN_2, mask=rows < work.len_q)
    rows_at = work.batch, work.head, 0, work.first_row + consumer * ROWS, work.len_q
    output = by_row(output, inverse)
    if centres is not None:
        # The keys' share of P, without those of the first block, of which nothing was taken off.
        others = gl.convert_layout(gl.max(others, 1), ROW_LAYOUT)
        others = gl.where(work.begin == 0, others, row_sum)
        if sinks is not None:
            others -= 2.0**LARGEST_P * gl.exp2(sink - state.reference)
        share = gl.where(row_sum == 0.0, 0.0, others / row_sum)
        columns = gl.arange(0, BLOCK_VALUE_DIM, gl.SliceLayout(0, O_LAYOUT))
        centre = gl.expand_dims(gl.load(centres + kv_head.to(gl.int64) * BLOCK_VALUE_DIM + columns), 0)
        output += gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT)), 1) * centre
    write(out_tiles, out, out_strides, output, rows_at, buffers.out.index(consumer), False, VALUE_DIM)


@gluon.jit
def attention_forward_fp8_hopper(
    q_tiles, k_tiles, v_tiles, out_tiles, out, out_strides, lse, sinks, counter, span, scores, scales, centres,
    batches, heads, group,
    VALUE_DIM: gl.constexpr, STAGES: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, TWO_LEVEL: gl.constexpr,
    CONSUMERS: gl.constexpr,
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
        ones=shared(gl.float8e4nv, 1, SUMS, COLUMNS),
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
    ONES_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ones = gl.full([SUMS, COLUMNS], ONE, gl.uint8, ONES_LAYOUT)  # not cast: ptxas 12.8 gave two bytes of four of them
    buffers.ones.index(0).store(ones.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()  # what threads wrote so far, the copy engine and the tensor cores may see
    loads = q_tiles, k_tiles, v_tiles, counter, buffers, span, batches, heads, group
    rest = out_tiles, out, out_strides, lse, sinks, span, scores, scales, centres, batches, heads, group, buffers
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (produce, (loads,)),
                (consume, (rest, 0, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL)),
                (consume, (rest, 1, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL)),
            ],
            [4, 4],
            [240, 240],
        )
    else:
        gl.warp_specialize(
            [
                (produce, (loads,)),
                (consume, (rest, 0, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL)),
                (consume, (rest, 1, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL)),
                (consume, (rest, 2, VALUE_DIM, Q_IN_REGISTERS, TWO_LEVEL)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )
