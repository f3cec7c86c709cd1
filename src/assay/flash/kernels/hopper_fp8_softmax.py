"""The softmax of the FP8 forward on Hopper: one block of scores of a consumer's 64 rows.

No exponential is computed. The bits of a floating-point number, read as a whole number, are its logarithm but for a
curve of half a step of E4M3: so a score, scaled, shifted and cut to a byte, is P (`probabilities`).

Scores are FP16, two to a register and to an instruction: Q and K come with rows so short (`fp8.LONGEST`) that no
product of two is beyond it, and eleven bits of a score are more than P keeps.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_fragments import hidden_halves, largest_halves, less
from assay.flash.kernels.hopper_shared import ROWS, tanh

LARGEST_P = gl.constexpr(8)  # P's largest value is 2 to this, or up to 5/8 more
START = gl.constexpr(1024 + 8 * (8 + 7))  # of the largest P: its bits, in the last ones of an FP16 number
CUT = gl.constexpr(15 / 32)  # what is rounded after this was taken from it is cut, but for 1/32
MOST_SCORE = gl.constexpr(32000.0)  # above all scores of short rows; two such numbers are in FP16's range
FAR = gl.constexpr(1000.0)  # logarithms from here on leave FP16 too few bits
MOST_LOGARITHM = gl.constexpr(2.0**17)  # beyond, not even FP32 tells P from its neighbours


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
def probabilities(s, slope, start, LAYOUT: gl.constexpr):
    """P in E4M3, four numbers in two registers, each before a byte of no use.

    With the logarithm x of P, slope · score + start is 1024 + 8 · (x + 7) - 15/32: FP16 rounds it to a whole
    number, of which seven bits are left, four bits of exponent and three of mantissa as E4M3 has them, where a straight
    line from power to power of two stands for the exponential. Up to 2⁻⁶ E4M3's numbers lie evenly, and that line ends
    at 2⁻⁷; another one, 3 / 2 · (x + 9.6), goes on to 2⁻⁹. Below is 0.
    """
    s = gl.convert_layout(in_thread_order(s), LAYOUT, assert_trivial=True)
    even, odd = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    ROW: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    slope = gl.expand_dims(gl.convert_layout(slope, ROW, assert_trivial=True), 1)
    start = gl.expand_dims(gl.convert_layout(start, ROW, assert_trivial=True), 1)
    return cut(first, second, slope, start), cut(third, fourth, slope, start)


@gluon.jit
def cut(one, other, slope, start):
    """Two of `probabilities`. The other line is 3/16 of the first and 836."""
    CUT: gl.constexpr = """{
        .reg .b32 first, second, part, least;
        mov.b32 part, 0x32003200;
        mov.b32 second, 0x62886288;
        mov.b32 least, 0x64006400;
        mov.b32 first, {$1, $2};
        fma.rn.f16x2 first, first, $3, $4;
        fma.rn.f16x2 second, first, part, second;
        max.s16x2 first, first, second;
        max.s16x2 $0, first, least;
    }"""
    return gl.inline_asm_elementwise(
        CUT, "=r,h,h,r,r", [one, other, slope, start], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def twice(x):
    """In FP16, as a pair: one instruction."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.uint32, is_pure=True, pack=1)


@gluon.jit
def of_pair(x):
    """One of the two, in FP32."""
    return (x & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def fours(halves):
    """What `probabilities` made, four numbers to a register."""
    low, high = halves
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [low, high], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def singles(p, LAYOUT: gl.constexpr):
    """What `fours` put together: names for the parts, no instruction."""
    first = (p & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
    second = ((p >> 8) & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
    third = ((p >> 16) & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
    fourth = (p >> 24).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
    numbers = gl.join(gl.join(first, third), gl.join(second, fourth))
    return gl.convert_layout(gl.reshape(numbers, [p.shape[0], p.shape[1] * 4]), LAYOUT, assert_trivial=True)


@gluon.jit
def near(above, unit):
    """A number to take from a row's scores, twice, and what is then left of `above`: next to nothing, as FP16 holds it.

    Of a block far below the maximum some thousands are left, enough that all its P are 0. Too much gives NaN.
    """
    middle = gl.minimum(gl.maximum(above / gl.maximum(unit, 2.0**-120), -MOST_SCORE), MOST_SCORE)
    pair = twice(middle)
    left = gl.minimum(above - of_pair(pair) * unit, 8000.0)
    return pair, gl.where(gl.abs(above) < MOST_LOGARITHM, left, float("nan"))


@gluon.jit
def masked(s, block, tile, work, span):
    """−inf for keys that a row does not see."""
    position = tile.rows + (work.len_k - work.len_q - block * s.shape[1])
    limits = gl.full([ROWS], 0, gl.int32, tile.rows.type.layout) + (work.len_k - 1 - block * s.shape[1])
    if span.right is not None:
        limits = gl.minimum(limits, position + span.right)
    s = hidden_halves(s, limits, tile.columns, "behind")
    if span.left is not None:
        s = hidden_halves(s, position - span.left, tile.columns, "before")
    return s


@gluon.jit
def softmax(s, state, block, unit, tile, work, span, scores, LAYOUT: gl.constexpr, MASKED: gl.constexpr):
    """One block's scores → P times 2⁸ (see `probabilities`), what `State` has of it, and the factor for the rest.

    FP16 holds `start` as a whole number, so that the largest P lies somewhere in a step of E4M3: u of it, from 0 to 1.
    There a line with k of eight parts is log2(1 + k / 8) - (k + u) / 8 too large; with k as here that is next to
    nothing. `room` is for what FP16 rounds off `start` and the slope. The reference is what P is relative to then.
    """
    if scores.cap is not None:
        s = (tanh(s.to(gl.float32) * unit) * 16384.0).to(gl.float16)
        unit = scores.cap / 16384.0
    if MASKED:
        s = masked(s, block, tile, work, span)
    own = gl.convert_layout(gl.max(largest_halves(s).to(gl.float32), 1), state.maximum.type.layout)
    latest = gl.maximum(state.maximum, own * unit)
    above = latest
    if MASKED:
        above = gl.where(latest == float("-inf"), 0.0, latest)
    largest = gl.maximum(state.largest, unit * MOST_SCORE)
    base = gl.zeros_like(above)
    pair = gl.zeros_like(above).to(gl.uint32, bitcast=True)
    far = largest > FAR
    if far:
        pair, left = near(above, unit)
        base = above - left
        above = left
    s = less(s, pair, far)
    steps = gl.floor(8.0 * above + CUT)
    quarters = gl.floor(32.0 * above + 4.0 * CUT + 0.2)
    room = gl.floor(gl.abs(above) * 2.0**-6)
    start = twice((START + quarters) - 5.0 * steps - room)
    reference = base + (START - CUT - of_pair(start)) * 0.125
    slope = gl.full([ROWS], 0.0, gl.float32, latest.type.layout)
    slope += gl.minimum(gl.maximum(unit * 8.0, 2.0**-24), 65504.0)
    factor = gl.exp2(state.reference - reference)
    if MASKED:
        reference = gl.where(latest == float("-inf"), latest, reference)
    return probabilities(s, twice(slope), start, LAYOUT), latest, reference, largest, factor
