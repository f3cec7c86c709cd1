"""What the Hopper kernels share: shared memory, barriers, rows out to memory, small arithmetic."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

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
    """So many barriers, each of which opens after so many arrivals."""
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
def nothing(step):
    """0 (steps are fewer than 2³⁰), which the compiler does not know.

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
    gl.thread_barrier()


@gluon.jit
def write(tiles, out, strides, values, place, buffer, PACKED: gl.constexpr, DIM: gl.constexpr):
    """64 rows to memory, as `out` has them; `place` is batch, head, rows of earlier sequences, the first row, length.

    By the copy engine through `buffer`, which leaves out rows and dimensions that are not there, while the kernel goes
    on; by the threads what it cannot do: the last rows of a packed sequence, or rows that are not whole 16 bytes.
    """
    batch, head, before, first, length = place
    values = values.to(out.dtype.element_ty)
    if tiles is not None:
        if not PACKED or first + ROWS <= length:
            tma.store_wait(0)  # the one before may still be read
            buffer.store(values)
            fence_async_shared()
            tma.async_copy_shared_to_global(tiles, [batch, head, before + first, 0], buffer)
        else:
            write_rows(out, strides, values, batch, head, before, first, length, DIM)
    else:
        write_rows(out, strides, values, batch, head, before, first, length, DIM)


@gluon.jit
def write_rows(out, strides, values, batch, head, before, first, length, DIM: gl.constexpr):
    """By the threads."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(values, LAYOUT)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    out += batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    place = gl.expand_dims((before + rows).to(gl.int64) * strides[2], 1) + gl.expand_dims(dims, 0)
    gl.store(out + place, values, mask=gl.expand_dims(rows < length, 1) & gl.expand_dims(dims < DIM, 0))


@gluon.jit
def tanh(x):
    """To 11 bits, in one step: as many as 16-bit inputs have."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """To 2⁻²² (absolute), in one step."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


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


@gluon.constexpr_function
def _rescale(elements):
    """PTX: one thread's elements of an accumulator, times the factors of its two rows if any in the warp is not 1."""
    factors = 2 * elements
    lines = [
        ".reg .pred p, q;",
        f"setp.neu.f32 p, ${factors}, 0f3F800000;",
        f"setp.neu.f32 q, ${factors + 2}, 0f3F800000;",
        "or.pred p, p, q;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra.uni KEPT;",
        *(f"mul.f32 ${e}, ${e}, ${factors + (e & 2)};" for e in range(elements)),
        "KEPT:",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _in_place(elements, *others):
    """Operands: what is changed in place, then the others, so many elements of each."""
    outs, ins = ["=f"] * elements, [str(e) for e in range(elements)]
    return ",".join(outs + ins + [kind for kind in others for _ in range(elements)])


@gluon.jit
def rescaled(output, factor):
    """A warpgroup's accumulator times a factor a row; a warp whose factors are all 1 goes past it."""
    ELEMENTS: gl.constexpr = output.shape[0] * output.shape[1] // 128
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, output.type.layout)), 1)
    return gl.inline_asm_elementwise(
        _rescale(ELEMENTS),
        _in_place(ELEMENTS, "f"),
        [output, factor],
        dtype=gl.float32,
        is_pure=True,
        pack=ELEMENTS,
    )


@gluon.jit
def narrowed(x, LAYOUT: gl.constexpr):
    """The left half of x: registers, no traffic."""
    halves = gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1))
    return gl.convert_layout(gl.split(halves)[0], LAYOUT)


@gluon.jit
def widened(x, LAYOUT: gl.constexpr):
    """x and as many columns of 0 on its right: registers, no traffic."""
    both = gl.permute(gl.join(x, gl.zeros_like(x)), (0, 2, 1))
    return gl.convert_layout(gl.reshape(both, [x.shape[0], 2 * x.shape[1]]), LAYOUT)


@gluon.constexpr_function
def _bar(kind, number):
    """PTX. Of the hardware's 16 barriers Triton takes the first ones, a few for each partition."""
    return f"bar.{kind} {8 + number}, 256; mov.u32 $0, 0;"


@gluon.jit
def named_barrier(kind: gl.constexpr, number: gl.constexpr):
    """Of two warpgroups: one waits ("sync"), the other goes on ("arrive")."""
    gl.inline_asm_elementwise(_bar(kind, number), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _hide(elements, side):
    """PTX: one thread's elements of a matrix of scores, −inf beyond the limits of its two rows.

    Behind the limit, a warp goes past a half of the columns that all its rows see. An element's column is that of the
    thread's first plus what its number says.
    """
    limits, columns, half = 2 * elements, 3 * elements, elements // 2
    lines = [
        ".reg .pred p;",
        ".reg .s32 a, b, c;",
        f"sub.s32 a, ${limits}, ${columns};",
        f"sub.s32 b, ${limits + 2}, ${columns};",
    ]
    if side == "behind":
        lines += [
            "min.s32 c, a, b;",
            f"setp.lt.s32 p, c, {2 * half - 7};",
            "vote.sync.any.pred p, p, 0xffffffff;",
            "@!p bra.uni SEEN;",
        ]
    test = "ge" if side == "behind" else "le"
    for e in range(elements):
        if e == half and side == "behind":
            lines.append("SEEN:")
        lines += [
            f"setp.{test}.s32 p, {'ab'[(e >> 1) & 1]}, {(e >> 2) * 8 + (e & 1)};",
            f"selp.f32 ${e}, ${e}, 0fFF800000, p;",
        ]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def hidden(s, limits, columns, SIDE: gl.constexpr):
    """A warpgroup's scores, −inf where the column is "behind" or "before" its row's limit."""
    ELEMENTS: gl.constexpr = s.shape[0] * s.shape[1] // 128
    return gl.inline_asm_elementwise(
        _hide(ELEMENTS, SIDE),
        _in_place(ELEMENTS, "r", "r"),
        [s, gl.expand_dims(limits, 1), gl.expand_dims(columns, 0)],
        dtype=gl.float32,
        is_pure=True,
        pack=ELEMENTS,
    )


@gluon.jit
def partial_sums(p):
    """Of each row, four: what a thread has of it. No thread waits for another."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
