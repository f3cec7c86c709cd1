"""A warpgroup's matrices on Hopper as its threads have them: scaled, masked and cut in place.

A 64 × N accumulator: row = 16 · warp + 8 · h + lane // 4, column = 8 · c + 2 · (lane % 4) + j. A thread has element
4 · c + 2 · h + j: two rows (h), two neighbours (j) of every eight columns (c); four lanes share a row.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_shared import halvings


@gluon.jit
def log2(x):
    """To 2⁻²² (absolute), in one step."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def by_row(x, factor):
    """Every row times its factor. `hopper_forward` has it written out: ptxas orders code by the lines it comes from."""
    return x * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout)), 1)


@gluon.constexpr_function
def _in_place(registers, *others, kind="f"):
    """Operands: what is changed in place, registers of a kind, then the others, so many of each."""
    outs, ins = ["=" + kind] * registers, [str(e) for e in range(registers)]
    return ",".join(outs + ins + [each for each in others for _ in range(registers)])


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


@gluon.constexpr_function
def _hide_halves(registers, side):
    """PTX: one thread's pairs of FP16, −inf beyond the limits of its two rows; where a column is, see `_hide`."""
    limits, columns = 2 * registers, 4 * registers
    test = "ge" if side == "behind" else "le"
    lines = [".reg .s32 a, b;", ".reg .b16 x;", ".reg .b32 first, second, column, kept;"]
    for name, pair, place in ("a", "first", limits), ("b", "second", limits + 2):
        lines += [
            f"sub.s32 {name}, ${place}, ${columns};",
            f"max.s32 {name}, {name}, -1;",
            f"min.s32 {name}, {name}, 256;",
            f"cvt.rn.f16.s32 x, {name};",
            f"mov.b32 {pair}, {{x, x}};",
        ]
    for r in range(registers):
        lines += [
            f"mov.b32 column, {_whole_halves((r >> 1) * 8)};",
            f"set.{test}.u32.f16x2 kept, {('first', 'second')[r & 1]}, column;",
            f"lop3.b32 ${r}, ${r}, kept, 0xFC00FC00, 0xE2;",
        ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _whole_halves(number):
    """A whole number up to 1024 and the one after it, as a pair of FP16."""
    both = 0
    for place, x in enumerate((number, number + 1)):
        exponent = x.bit_length() - 1
        half = 0 if x == 0 else (exponent + 15 << 10) | ((x << 10 - exponent) & 1023)
        both |= half << 16 * place
    return f"0x{both:08X}"


@gluon.jit
def hidden_halves(s, limits, columns, SIDE: gl.constexpr):
    """`hidden` of scores in FP16 pairs, of up to 256 columns."""
    ELEMENTS: gl.constexpr = s.shape[0] * s.shape[1] // 128
    return gl.inline_asm_elementwise(
        _hide_halves(ELEMENTS // 2, SIDE),
        _in_place(ELEMENTS // 2, "r", "r", "r", "r", kind="r"),
        [s, gl.expand_dims(limits, 1), gl.expand_dims(columns, 0)],
        dtype=gl.float16,
        is_pure=True,
        pack=ELEMENTS,
    )


@gluon.jit
def by_threads(s):
    """(rows, ·, threads, 2): what each of the four threads has that share a row."""
    return gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])


@gluon.jit
def firsts(s):
    """(rows, 4): the first number that each of the four threads has that share a row."""
    each = by_threads(s)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, each.type.layout))
    own = gl.permute(gl.split(each)[0], (0, 2, 1))
    for _ in gl.static_range(halvings(s.shape[1] // 16)):
        own = gl.split(gl.reshape(own, [own.shape[0], 4, own.shape[2] // 2, 2]))[0]
    return gl.convert_layout(gl.split(own)[0], LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _largest(elements):
    """PTX: the largest of one thread's elements of each of its two rows, in place of its first there.

    As whole numbers, of which three are compared in one instruction: what is not negative has the same order then.
    Negative numbers have the other one; if a row has no others, the warp looks for the least of them.
    """
    rows = [[e for e in range(elements) if (e >> 1) & 1 == row] for row in range(2)]
    lines = [".reg .pred p;", ".reg .s32 a, b, c, d, x;"]

    def over(names, how):
        for place in range(elements // 2):
            for name, row in zip(names, rows, strict=True):
                lines.append(f"mov.b32 x, ${elements + row[place]};")
                lines.append(f"{how}.s32 {name}, {name}, x;" if place else f"mov.b32 {name}, x;")

    over("ab", "max")
    lines += ["min.s32 x, a, b;", "setp.lt.s32 p, x, 0;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra.uni FOUND;"]
    over("cd", "min")
    lines += [f"setp.lt.s32 p, {most}, 0; selp.b32 {most}, {least}, {most}, p;" for most, least in ("ac", "bd")]
    return "{ " + " ".join([*lines, "FOUND:", "mov.b32 $0, a;", "mov.b32 $2, b;"]) + " }"


@gluon.jit
def largest(s):
    """(rows, 4): of a warpgroup's scores, the largest that each of the four threads has that share a row."""
    ELEMENTS: gl.constexpr = s.shape[0] * s.shape[1] // 128
    s = gl.inline_asm_elementwise(
        _largest(ELEMENTS), _in_place(ELEMENTS), [s], dtype=gl.float32, is_pure=True, pack=ELEMENTS
    )
    return firsts(s)


@gluon.constexpr_function
def _largest_halves(registers):
    """PTX: of one thread's pairs of FP16, the largest of each of its two rows, in place of its first two there."""
    lines = [".reg .b32 a, b, x;", "mov.b32 a, $0;", "mov.b32 b, $1;"]
    for register in range(2, registers, 2):
        lines += [f"max.f16x2 a, a, ${register};", f"max.f16x2 b, b, ${register + 1};"]
    for largest, first in ("a", 0), ("b", 1):
        lines += [f"prmt.b32 x, {largest}, {largest}, 0x1032;", f"max.f16x2 ${first}, {largest}, x;"]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def largest_halves(s):
    """(rows, 4): of a warpgroup's scores in FP16, the largest that each of the four threads has that share a row."""
    ELEMENTS: gl.constexpr = s.shape[0] * s.shape[1] // 128
    s = gl.inline_asm_elementwise(
        _largest_halves(ELEMENTS // 2),
        _in_place(ELEMENTS // 2, kind="r"),
        [s],
        dtype=gl.float16,
        is_pure=True,
        pack=ELEMENTS,
    )
    return firsts(s)


@gluon.constexpr_function
def _less(registers):
    """PTX: one thread's pairs of FP16, less a pair for each of its two rows, if the last operand is not 0."""
    rows = 2 * registers
    lines = [
        ".reg .pred p;",
        f"setp.ne.s32 p, ${2 * rows}, 0;",
        "@!p bra.uni KEPT;",
        *(f"sub.rn.f16x2 ${r}, ${r}, ${rows + 2 * (r & 1)};" for r in range(registers)),
        "KEPT:",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def less(s, pairs, condition):
    """A warpgroup's scores in FP16, less a number of each row, given twice; as they were if the condition is not met.

    Written in Triton, both ways out of the `if` would take every pair apart.
    """
    ELEMENTS: gl.constexpr = s.shape[0] * s.shape[1] // 128
    return gl.inline_asm_elementwise(
        _less(ELEMENTS // 2),
        _in_place(ELEMENTS // 2, "r", "r", "r", "r", kind="r"),
        [s, gl.expand_dims(pairs, 1), condition.to(gl.int32)],
        dtype=gl.float16,
        is_pure=True,
        pack=ELEMENTS,
    )


@gluon.jit
def halves(x):
    """The left and the right half of x: registers, no traffic."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def narrowed(x, SIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """One half of x, 0 the left one."""
    return gl.convert_layout(halves(x)[SIDE], LAYOUT)


@gluon.jit
def widened(x, SIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """x as one half, 0 the left one, beside as many columns of 0: registers, no traffic."""
    nothing = gl.zeros_like(x)
    both = gl.permute(gl.join(nothing, x) if SIDE else gl.join(x, nothing), (0, 2, 1))
    return gl.convert_layout(gl.reshape(both, [x.shape[0], 2 * x.shape[1]]), LAYOUT)


@gluon.jit
def in_order(x):
    """A 64 × 64 accumulator, or one of pairs, as shared memory takes it best: 16 bytes of each thread in a row.

    Of an accumulator a thread's element 4 · c + 2 · h + j has place 4 · (128 · c + thread) + 2 · h + j.
    """
    if x.shape[1] == 64:
        x = gl.permute(gl.reshape(x, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    else:
        x = gl.permute(gl.reshape(x, [4, 2, 8, 4, 2, 4]), (3, 0, 2, 5, 4, 1))
    return gl.reshape(x, [x.numel // 512, 512])


@gluon.jit
def as_fragment(x):
    """What `in_order` put in order."""
    if x.shape[0] == 8:
        return gl.reshape(gl.permute(gl.reshape(x, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5)), [64, 64])
    else:
        return gl.reshape(gl.permute(gl.reshape(x, [4, 4, 8, 4, 2, 2]), (1, 5, 2, 0, 4, 3)), [64, 32])
