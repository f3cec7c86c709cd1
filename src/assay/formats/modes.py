"""The rounding modes by name, and what each does with a value beyond the range."""

from __future__ import annotations

import difflib
import math
from typing import Literal, get_args

from assay.formats.spec import Format

Rounding = Literal["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"]

ROUNDINGS: tuple[str, ...] = get_args(Rounding)
"""Their names: nearest_even, nearest_away, toward_zero, up, down, stochastic."""


def check_rounding(rounding: str) -> None:
    """Raise a ValueError that lists the modes unless `rounding` is one of them."""
    if rounding in ROUNDINGS:
        return
    near = difflib.get_close_matches(str(rounding).lower().replace("-", "_"), ROUNDINGS, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"Unknown rounding {rounding!r}. {hint}Known: {', '.join(ROUNDINGS)}.")


def overflow_magnitude(format: Format, rounding: str, saturate: bool, *, negative: bool, infinite: bool) -> float:
    """The magnitude that stands for a value beyond the range: the format's max, inf or NaN.

    `negative` is the sign of the value, `infinite` whether it was an infinity before rounding (an
    infinity is exact, so that no rounding direction can bring it back into the range).
    """
    never_beyond = ("toward_zero", "up" if negative else "down")  # IEEE 754: these stop at the largest value
    if saturate or (rounding in never_beyond and not infinite):
        return format.max
    if format.infinities:
        return math.inf
    return math.nan if format.nan != "none" else format.max
