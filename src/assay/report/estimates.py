"""A figure over several seeds, with its confidence interval. Without one, nothing is shown."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import NamedTuple

from assay.metrics.student_t import mean_and_half_width

_CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean over seeds and its 95% confidence interval."""

    value: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def estimate(values: Iterable[float]) -> Estimate | None:
    """The arithmetic mean and its interval; None with fewer than two values or any that is not finite."""
    found = list(values)
    if len(found) < 2 or not all(math.isfinite(x) and abs(x) < 1e150 for x in found):
        return None  # the squares of larger ones overflow
    mean, half = mean_and_half_width(found, _CONFIDENCE)
    return Estimate(mean, mean - half, mean + half, len(found))


def estimate_size(values: Iterable[float]) -> Estimate | None:
    """For sizes and ratios, which vary by factors: the geometric mean and its interval.

    A zero has no logarithm: all zeros are 0 [0, 0], some zeros fall back to the arithmetic mean.
    """
    found = list(values)
    if len(found) < 2 or not all(math.isfinite(x) and x >= 0 for x in found):
        return None
    if min(found) == 0:
        return estimate(found)
    mean, half = mean_and_half_width([math.log(x) for x in found], _CONFIDENCE)
    if mean + half > math.log(sys.float_info.max):
        return None  # an interval without an end
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(found))
