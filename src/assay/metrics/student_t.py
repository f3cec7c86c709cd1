"""Student's t: how many standard errors an interval reaches that was estimated from a few values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence


@functools.lru_cache(maxsize=256)
def student_t(confidence: float, freedom: int) -> float:
    """The t with P(|T| < t) = `confidence`, for `freedom` degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if _within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t): a finite sum of powers of the cosine of atan(t / √freedom)."""
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    # The powers are 1, 3, … up to freedom - 2 for odd degrees of freedom, 0, 2, … for even ones.
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def mean_and_half_width(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """The mean and how far its confidence interval reaches to either side; infinitely far with one value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    return mean, student_t(confidence, len(values) - 1) * math.sqrt(variance(values) / len(values))


def variance(values: Sequence[float]) -> float:
    """The variance of what `values` were drawn from, estimated with their own mean."""
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
