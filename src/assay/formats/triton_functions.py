"""Rounding as Triton device functions, for any kernel to call on its blocks.

The arithmetic is that of `torch_rounding`: the magic number, or integers where the format has all the
exponent bits of its carrier. Triton neither reorders floating-point sums nor flushes subnormals in them
(it would need `fast-math` for the first and libdevice for the second), so the magic number is safe here.

`device_constants` gives the compile-time arguments of the two public functions for a format.
"""

# mypy: disable-error-code="untyped-decorator"
# (Triton's are.)
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from assay.formats.dtypes import holds
from assay.formats.modes import overflow_magnitude
from assay.formats.spec import Format

# What stands for a value beyond the range.
INFINITY = tl.constexpr(0)
NAN = tl.constexpr(1)
LARGEST = tl.constexpr(2)

# One instruction rounds to fp16 or bf16. Triton's interpreter, which runs the kernels in the tests where
# there is no GPU, truncates to bf16 instead, so it takes the long way.
_HARDWARE_CASTS = tl.constexpr(not triton.knobs.runtime.interpret)


class DeviceConstants(NamedTuple):
    """The compile-time arguments of the device functions below, in their order."""

    mantissa: int
    min_exponent: int
    max: float
    overflow: int
    """INFINITY, NAN or LARGEST: what an infinity becomes, and to nearest a finite value beyond the range."""
    flush: bool
    """Whether subnormals are flushed to zero."""


def device_constants(format: Format, *, saturate: bool = False) -> DeviceConstants:
    """What `round_nearest_even_fp32` and `round_toward_zero_fp32` need to know about `format`."""
    if not holds(torch.float32, format):
        raise ValueError(
            f"Blocks of fp32 can only be rounded to a format that fp32 holds, got {format}. "
            "Use at most 8 exponent bits and 23 mantissa bits."
        )
    overflow = overflow_code(format, "nearest_even", saturate, infinite=True)
    return DeviceConstants(format.mantissa, format.min_exponent, format.max, overflow, flush=not format.subnormals)


def overflow_code(
    format: Format, rounding: str, saturate: bool, *, negative: bool = False, infinite: bool = False
) -> int:
    """INFINITY, NAN or LARGEST, as `overflow_magnitude` has it."""
    value = overflow_magnitude(format, rounding, saturate, negative=negative, infinite=infinite)
    if math.isnan(value):
        return int(NAN.value)
    return int(INFINITY.value if math.isinf(value) else LARGEST.value)


@triton.jit
def round_nearest_even_fp32(
    x: tl.tensor,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    FLUSH: tl.constexpr = False,
) -> tl.tensor:
    """Round the fp32 block `x` to nearest, ties to even. A value beyond the range becomes OVERFLOW."""
    NATIVE: tl.constexpr = _HARDWARE_CASTS and OVERFLOW == INFINITY and not FLUSH
    if NATIVE and MANTISSA == 10 and MIN_EXPONENT == -14:
        return x.to(tl.float16).to(tl.float32)
    elif NATIVE and MANTISSA == 7 and MIN_EXPONENT == -126:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        rounded = round_unbounded(x, x, "nearest_even", MANTISSA, MIN_EXPONENT, FLUSH)
        rounded = tl.where(rounded > MAX, overflow_value(x, MAX, OVERFLOW), rounded)
        return copy_sign(rounded, x)


@triton.jit
def round_toward_zero_fp32(
    x: tl.tensor,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    FLUSH: tl.constexpr = False,
) -> tl.tensor:
    """Cut the fp32 block `x`. A finite value stops at MAX, an infinity becomes OVERFLOW."""
    rounded = round_unbounded(x, x, "toward_zero", MANTISSA, MIN_EXPONENT, FLUSH)
    beyond = tl.where(tl.abs(x) == float("inf"), overflow_value(x, MAX, OVERFLOW), MAX)
    return copy_sign(tl.where(rounded > MAX, beyond, rounded), x)


@triton.jit
def round_unbounded(
    x: tl.tensor,
    random: tl.tensor,
    ROUNDING: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    FLUSH: tl.constexpr,
) -> tl.tensor:
    """|x|, of fp32 or fp64, rounded as if there were no largest value. `random` is uniform in [0, 1)."""
    BIAS: tl.constexpr = 1023 if x.dtype == tl.float64 else 127
    if MIN_EXPONENT == 1 - BIAS:
        rounded = _round_by_integers(x, random, ROUNDING, MANTISSA)
    else:
        rounded = _round_by_magic_number(x, random, ROUNDING, MANTISSA, MIN_EXPONENT, BIAS)
    if FLUSH:
        rounded = tl.where(rounded < 2.0**MIN_EXPONENT, 0.0, rounded)
    return rounded


@triton.jit
def _round_by_magic_number(
    x: tl.tensor,
    random: tl.tensor,
    ROUNDING: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BIAS: tl.constexpr,
) -> tl.tensor:
    WIDTH: tl.constexpr = 52 if x.dtype == tl.float64 else 23
    LIFT: tl.constexpr = WIDTH - MANTISSA
    exact = tl.abs(x)
    if LIFT > 0:
        exponent = _bits(exact) >> WIDTH
        exponent = tl.minimum(tl.maximum(exponent, MIN_EXPONENT + BIAS), 2 * BIAS - LIFT) + LIFT
        magic = _float(exponent << WIDTH)
        nearest = (exact + magic) - magic
    else:  # down to C the format is as fine as its carrier: only values below have anything to round
        magic = tl.zeros_like(exact) + 2.0 ** (MIN_EXPONENT + LIFT)
        nearest = tl.where(exact < magic, (exact + magic) - magic, exact)
    if ROUNDING == "nearest_even":
        return nearest
    else:
        spacing = magic * 2.0**-WIDTH
        return _redirect(nearest, exact, spacing, x, random, ROUNDING)


@triton.jit
def _redirect(
    nearest: tl.tensor,
    exact: tl.tensor,
    spacing: tl.tensor,
    x: tl.tensor,
    random: tl.tensor,
    ROUNDING: tl.constexpr,
) -> tl.tensor:
    """Turn |x| rounded to nearest even into |x| rounded in another direction."""
    if ROUNDING == "nearest_away":
        return tl.where(exact - nearest == spacing * 0.5, nearest + spacing, nearest)
    else:
        below = tl.where(nearest > exact, nearest - spacing, nearest)
        rest = exact - below
        if ROUNDING == "up":
            return tl.where((rest > 0) & (_bits(x) >= 0), below + spacing, below)
        elif ROUNDING == "down":
            return tl.where((rest > 0) & (_bits(x) < 0), below + spacing, below)
        elif ROUNDING == "stochastic":
            return tl.where(random * spacing < rest, below + spacing, below)
        else:
            return below


@triton.jit
def _round_by_integers(x: tl.tensor, random: tl.tensor, ROUNDING: tl.constexpr, MANTISSA: tl.constexpr) -> tl.tensor:
    WIDTH: tl.constexpr = 52 if x.dtype == tl.float64 else 23
    CUT: tl.constexpr = WIDTH - MANTISSA
    exact = tl.abs(x)
    if CUT == 0:
        return exact
    else:
        bits = _bits(exact)
        bits += _addend(bits, x, random, ROUNDING, MANTISSA, CUT)
        rounded = _float(bits & -(1 << CUT))
        return tl.where(x == x, rounded, float("nan"))  # a carry can run out of a NaN


@triton.jit
def _addend(
    bits: tl.tensor,
    x: tl.tensor,
    random: tl.tensor,
    ROUNDING: tl.constexpr,
    MANTISSA: tl.constexpr,
    CUT: tl.constexpr,
) -> tl.tensor:
    """What to add to `bits` so that cutting the last CUT of them rounds as asked."""
    HALF: tl.constexpr = 1 << (CUT - 1)
    ALL: tl.constexpr = (1 << CUT) - 1
    if ROUNDING == "nearest_even":
        if MANTISSA > 0:
            return ((bits >> CUT) & 1) + (HALF - 1)
        else:  # the last bit kept is the leading one, which is not stored
            return tl.minimum(bits >> CUT, 1) + (HALF - 1)
    elif ROUNDING == "nearest_away":
        return tl.zeros_like(bits) + HALF
    elif ROUNDING == "up":
        return tl.where(_bits(x) >= 0, ALL, 0)
    elif ROUNDING == "down":
        return tl.where(_bits(x) < 0, ALL, 0)
    elif ROUNDING == "stochastic":
        return (random * (2.0**CUT)).to(bits.dtype)
    else:
        return tl.zeros_like(bits)


@triton.jit
def overflow_value(x: tl.tensor, MAX: tl.constexpr, OVERFLOW: tl.constexpr) -> tl.tensor:
    """A block like `x` full of what an overflow code stands for; a bare MAX would be taken for fp32."""
    if OVERFLOW == INFINITY:
        return tl.full(x.shape, float("inf"), x.dtype)
    elif OVERFLOW == NAN:
        return tl.full(x.shape, float("nan"), x.dtype)
    else:
        return tl.full(x.shape, MAX, x.dtype)


@triton.jit
def copy_sign(magnitude: tl.tensor, x: tl.tensor) -> tl.tensor:
    """`magnitude`, which has no sign, with the sign of `x`; signed zeros included."""
    if x.dtype == tl.float64:
        return _float(_bits(magnitude) | (_bits(x) & -0x8000000000000000))
    else:
        return _float(_bits(magnitude) | (_bits(x) & -0x80000000))


@triton.jit
def _bits(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits: tl.tensor) -> tl.tensor:
    if bits.dtype == tl.int64:
        return bits.to(tl.float64, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)
