"""A figure over several seeds, with its confidence interval. Without one, nothing is shown."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Student's t for 95%, two-sided, by degrees of freedom 1 to 30; beyond, the expansion of the normal one.
_T95 = (
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
    2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
    2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227,
)  # fmt: skip


class Estimate(NamedTuple):
    """A mean over seeds and its 95% confidence interval."""

    value: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def student_t95(freedom: int) -> float:
    """Half-width of a 95% interval in standard errors."""
    if freedom < 1:
        raise ValueError(f"An interval needs at least 2 values, got {freedom + 1}. Use more seeds.")
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def estimate(values: Iterable[float]) -> Estimate | None:
    """The arithmetic mean and its interval; None with fewer than two values or any that is not finite."""
    found = list(values)
    if len(found) < 2 or not all(math.isfinite(x) and abs(x) < 1e150 for x in found):
        return None  # the squares of larger ones overflow
    mean, half = _mean_and_half(found)
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
    mean, half = _mean_and_half([math.log(x) for x in found])
    if mean + half > math.log(sys.float_info.max):
        return None  # an interval without an end
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(found))


def _mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
    return mean, student_t95(len(values) - 1) * math.sqrt(variance / len(values))
