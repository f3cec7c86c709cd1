"""Student's t against scipy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from assay.metrics.student_t import mean_and_half_width, student_t


@given(st.integers(1, 200), st.floats(0.5, 0.99999))
def test_quantiles(freedom: int, confidence: float) -> None:
    assert student_t(confidence, freedom) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-7)


def test_one_value_has_no_interval() -> None:
    assert mean_and_half_width([2.0], 0.95) == (2.0, math.inf)
    mean, half = mean_and_half_width([1.0, 2.0, 4.0], 0.9)
    low, high = stats.t.interval(0.9, 2, loc=7 / 3, scale=stats.sem([1.0, 2.0, 4.0]))
    assert (mean - half, mean + half) == pytest.approx((low, high))
