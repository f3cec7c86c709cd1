"""Rounding one number, with exact arithmetic: the specification that the tensor code is tested against.

What holds here and for `round_to`:

- The result is an ordinary float that holds a value of the format. Signed zeros are kept: a negative
  value that rounds to zero becomes -0.0.
- NaN stays NaN, even where the format has no NaN code: the carrier can hold it, and a NaN that
  vanishes would hide a bug.
- A value is beyond the range if its rounding with unbounded exponent exceeds the largest value. It
  becomes ±inf, or NaN where the format has no infinities, or ±max where it has neither. `toward_zero`
  (and `up` below zero, `down` above it) stops at ±max, as in IEEE 754.
- `saturate=True` gives ±max for all of these and for infinities too, as in OCP's saturating mode.
- Without subnormals, a result under the smallest normal is flushed to zero after rounding.
- Ties of formats with no mantissa bits, where neither neighbour is even, go to the larger magnitude
  (IEEE 754-2019, 4.3.1).
"""

from __future__ import annotations

import math
from fractions import Fraction

from assay.formats.catalog import get
from assay.formats.modes import Rounding, check_rounding, overflow_magnitude
from assay.formats.spec import Format


def round_scalar(
    x: float,
    format: Format | str,
    *,
    rounding: Rounding = "nearest_even",
    saturate: bool = False,
    random: float | None = None,
) -> float:
    """Round `x` to the nearest value of `format` in the sense of `rounding`.

    `random` in [0, 1) decides a stochastic rounding: up in magnitude if it is less than the fraction.
    """
    format = get(format)
    check_rounding(rounding)
    _check_random(rounding, random)
    if math.isnan(x):
        return math.nan
    negative = math.copysign(1.0, x) < 0
    if math.isinf(x):
        magnitude = overflow_magnitude(format, rounding, saturate, negative=negative, infinite=True)
    else:
        exact = _round_unbounded(Fraction(abs(x)), format, rounding, negative, random)
        if exact > Fraction(format.max):
            magnitude = overflow_magnitude(format, rounding, saturate, negative=negative, infinite=False)
        elif exact < Fraction(format.smallest):
            magnitude = 0.0
        else:
            magnitude = float(exact)
    return math.copysign(magnitude, x)


def _round_unbounded(x: Fraction, format: Format, rounding: str, negative: bool, random: float | None) -> Fraction:
    """`x` ≥ 0 as a multiple of the format's spacing at `x`, however large it gets."""
    if x == 0:
        return x
    spacing = Fraction(2) ** (max(_exponent(x), format.min_exponent) - format.mantissa)
    below = x // spacing
    fraction = x / spacing - below
    return (below + _rounds_up(below, fraction, rounding, negative, random)) * spacing


def _exponent(x: Fraction) -> int:
    """The e with 2**e ≤ x < 2**(e+1)."""
    return math.frexp(x)[1] - 1  # exact: x came from a float


def _rounds_up(below: int, fraction: Fraction, rounding: str, negative: bool, random: float | None) -> bool:
    """Whether the magnitude `below + fraction`, in units of the spacing, goes up to `below + 1`."""
    half = Fraction(1, 2)
    match rounding:
        case "nearest_even":
            return fraction > half or (fraction == half and below % 2 == 1)
        case "nearest_away":
            return fraction >= half
        case "up":
            return fraction > 0 and not negative
        case "down":
            return fraction > 0 and negative
        case "stochastic":
            assert random is not None
            return Fraction(random) < fraction
    return False  # toward_zero


def _check_random(rounding: str, random: float | None) -> None:
    if rounding != "stochastic" and random is not None:
        raise ValueError(
            f"random only decides stochastic rounding, got random={random!r} with rounding={rounding!r}. "
            "Leave it out or use rounding='stochastic'."
        )
    if rounding == "stochastic" and (random is None or not 0 <= random < 1):
        raise ValueError(
            f"Stochastic rounding needs random in [0, 1), got {random!r}. Pass for example random.random()."
        )
