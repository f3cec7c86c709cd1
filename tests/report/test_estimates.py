"""Intervals against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from assay.report.estimates import Estimate, estimate, estimate_size

VALUES = st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=40)


def interval(values: list[float]) -> tuple[float, float]:
    mean, error = np.mean(values), stats.sem(values)
    return tuple(mean + np.array([-1, 1]) * stats.t.ppf(0.975, len(values) - 1) * error)


@given(VALUES)
def test_mean(values: list[float]) -> None:
    found = estimate(values)
    assert found is not None
    low, high = interval(values)
    size = max(values)
    assert found == pytest.approx((np.mean(values), low, high, len(values)), rel=1e-4, abs=1e-4 * size)


@given(VALUES)
def test_geometric_mean(values: list[float]) -> None:
    found = estimate_size(values)
    assert found is not None
    low, high = interval([math.log(x) for x in values])
    assert math.log(found.value) == pytest.approx(math.log(stats.gmean(values)), abs=1e-6)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((low, high), rel=1e-4, abs=1e-3)
    assert found.seeds == len(values)


def test_zeros() -> None:
    assert estimate_size([0.0, 0.0, 0.0]) == Estimate(0.0, 0.0, 0.0, 3)
    assert estimate_size([0.0, 2.0]) == estimate([0.0, 2.0])


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.inf], [1.0, math.nan]])
def test_without_an_interval_there_is_nothing(values: list[float]) -> None:
    assert estimate(values) is None
    assert estimate_size(values) is None


def test_a_size_is_not_negative() -> None:
    assert estimate_size([1.0, -1.0]) is None
