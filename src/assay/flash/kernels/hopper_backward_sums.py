"""dQ in the one-pass Hopper backward: a tile's share of it is multiplied, and added up in memory by the copy engine."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from assay.flash.kernels.gluon_names import copy_out, reinterpret
from assay.flash.kernels.hopper_fragments import in_order
from assay.flash.kernels.hopper_shared import ROWS, add_tile, stage_of

NOWHERE = gl.constexpr(1 << 24)  # a place of dQ behind the last one: the copy engine leaves it out


@gluon.jit
def add_q(dq, dq_lines, place, buffer, FRESH: gl.constexpr):
    """64 × 64 of dQ, added up in memory: in the order in which the threads hold them, 16 bytes at a time.

    FRESH: those of a head's first keys are written, not added; they have the place −1 − `place`.
    """
    buffer = reinterpret(buffer, gl.float32, [16, 256], gl.NVMMASharedLayout(0, 32, 2))
    tma.store_wait(0)  # the one before may still be read
    buffer.store(in_order(dq).reshape([16, 256]))
    fence_async_shared()
    if FRESH:
        if place < 0:
            copy_out(dq_lines, [(-1 - place) * 16, 0], buffer)
        else:
            add_tile(dq_lines, [place * 16, 0], buffer)
    else:
        add_tile(dq_lines, [place * 16, 0], buffer)


@gluon.jit
def multiply_q(buffers, slot, stage, consumer: gl.constexpr, BLOCK_DIM: gl.constexpr):
    """dS·K of a block of rows, in flight. D 128: of half of the dimensions; D 64: of half of the rows."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], buffers.k.dtype)
    dq = gl.zeros([ROWS, 64], gl.float32, LAYOUT)
    for i in gl.static_range(2):
        k = buffers.k.index(slot * 2 + i)
        if BLOCK_DIM == 128:
            ds = buffers.ds.index(stage * 2 + i)
            k = reinterpret(k, buffers.k.dtype, [2, ROWS, 64], HALF).index(consumer)
        else:
            ds = buffers.ds.index((stage * 2 + i) * 2 + consumer)
        dq = warpgroup_mma(ds, k, dq, use_acc=i == 1, is_async=True)
    return dq


@gluon.jit
def last_q(step, slot, buffers, consumer: gl.constexpr, BLOCK_DIM: gl.constexpr):
    """dQ of the block before `step`."""
    stage, phase = stage_of(step)
    mbarrier.wait(buffers.ds_full.index(stage), phase)
    dq = multiply_q(buffers, slot, stage, consumer, BLOCK_DIM)
    return warpgroup_mma_wait(0, deps=(dq,))


@gluon.jit
def place_of_sums(place, work, FRESH: gl.constexpr):
    """As `add_q` takes it."""
    if FRESH:
        place = gl.where(work.first_key == 0, -1 - place, place)
    return place
