"""What the Hopper kernels share: shared memory, barriers, rows out to memory, small arithmetic."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from assay.flash.kernels.gluon_names import copy_out, thread_barrier
from assay.flash.kernels.places import FIELDS

ROWS = gl.constexpr(64)  # of a consumer: what one wgmma makes
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def shared(dtype: gl.constexpr, number: gl.constexpr, rows: gl.constexpr, dims: gl.constexpr):
    """So many tiles of shared memory."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, dims], dtype)
    return gl.allocate_shared_memory(dtype, [number, rows, dims], LAYOUT)


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """So many barriers, each of which opens after so many arrivals.

    Make none that is not used: Triton gives its place to other numbers, but the GPU knows it as a barrier, and makes it
    one again after another process has had its turn.
    """
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def lines(number: gl.constexpr, length: gl.constexpr):
    """So many lines of FP32 numbers in shared memory."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return gl.allocate_shared_memory(gl.float32, [number, length], LAYOUT)


@builtin
def add_tile(tiles, place, buffer, _semantic=None):
    """The copy engine adds a tile to what is in memory; as a copy, waited for by `tma.store_wait`."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tiles.handle, place, buffer.handle)


@gluon.jit
def stores_done():
    """What the copy engine was told to write is in memory; `tma.store_wait` waits only until it has been read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fields_of(places, tile):
    """Of a packed tile, see `places.FIELDS`: sequence, number, queries before and in it, keys before and in it."""
    place = places + 1 + FIELDS * tile
    sequence, number = gl.load(place), gl.load(place + 1)
    before_q, len_q = gl.load(place + 2), gl.load(place + 3)
    before_k, len_k = gl.load(place + 4), gl.load(place + 5)
    return sequence, number, before_q, len_q, before_k, len_k


@gluon.jit
def line_of(before_q, sequence):
    """Where a packed sequence's rows begin in the lines of LSE, delta and dQ: see `tile.line_of`."""
    return (before_q // 128 + sequence) * 128


@gluon.constexpr_function
def halvings(count):
    """How often a power of 2 can be halved."""
    assert count & (count - 1) == 0
    return count.bit_length() - 1


@gluon.jit
def stage_of(step, STAGES: gl.constexpr = 2):
    """The stage that a step takes, and the phase of its barriers: bits, since a quotient would look at the sign.

    A stage's n-th use (from 0) has phase n & 1. Who reads waits for `full` with that phase; who fills waits for `empty`
    with the other one, phase ^ 1, which a barrier that nobody has used yet lets pass: the first round does not wait.
    """
    return step & (STAGES - 1), (step >> halvings(STAGES)) & 1


@gluon.jit
def zero_unknown_to_compiler(step):
    """0, since steps are fewer than 2³⁰, but the compiler does not know that.

    Added to the index of a tile that never moves, it keeps the tile's address out of the registers: the compiler would
    compute it once, before the loop, for each of its products, and spill what else is there.
    """
    return step >> 30


@gluon.jit
def clean(tile, there):
    """Packed: 0 in place of the next sequence's rows, behind the first `there`: 0·NaN would be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for i in gl.static_range(tile.shape[0] // 16):
        part = tile.slice(16 * i, 16)
        rows = 16 * i + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        part.store(gl.where(gl.expand_dims(rows < there, 1), part.load(LAYOUT), 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def write(
    tiles, out, strides, values, place, buffer, PACKED: gl.constexpr, DIM: gl.constexpr, SKIPPED: gl.constexpr = 0
):  # fmt: skip
    """64 rows to memory, as `out` has them; `place` is batch, head, rows of earlier sequences, the first row, length.

    `values` are those of the DIM dimensions that come after the first SKIPPED, or some of them. All through `buffer`:
    by the copy engine, which leaves out rows and dimensions that are not there, while the kernel goes on; by the
    threads what it cannot do: the last rows of a packed sequence, or rows that are not whole 16 bytes.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    batch, head, before, first, length = place
    tma.store_wait(0)  # the one before may still be read
    buffer.store(values.to(out.dtype.element_ty))
    if tiles is not None:
        if not PACKED or first + ROWS <= length:
            fence_async_shared()
            copy_out(tiles, [batch, head, before + first, SKIPPED], buffer)
        else:
            write_rows(out, strides, buffer.load(LAYOUT), batch, head, before, first, length, DIM, SKIPPED)
    else:
        write_rows(out, strides, buffer.load(LAYOUT), batch, head, before, first, length, DIM, SKIPPED)


@gluon.jit
def write_rows(
    out, strides, values, batch, head, before, first, length, DIM: gl.constexpr, SKIPPED: gl.constexpr
):  # fmt: skip
    """By the threads."""
    LAYOUT: gl.constexpr = values.type.layout
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = SKIPPED + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    out += batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    place = gl.expand_dims((before + rows).to(gl.int64) * strides[2], 1) + gl.expand_dims(dims, 0)
    gl.store(out + place, values, mask=gl.expand_dims(rows < length, 1) & gl.expand_dims(dims < DIM, 0))


@gluon.jit
def tanh(x):
    """To 11 bits, in one step: as many as 16-bit inputs have."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def packed(p, dtype: gl.constexpr):
    """P as pairs of 16-bit numbers: single ones would be put together again at every turn of the loop."""
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    cast: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(cast, "=r,f,f", [low, high], dtype=gl.uint32, is_pure=True, pack=1)


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """What `packed` packed: names for the halves, no instruction."""
    low = (pairs & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.uint16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [pairs.shape[0], pairs.shape[1] * 2]), LAYOUT)


@gluon.jit
def partial_sums(p):
    """Of each row, four: what a thread has of it. No thread waits for another."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
