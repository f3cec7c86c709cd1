"""What is particular to the scalar version; the rest is tested with its twins."""

from __future__ import annotations

import math
import random

import pytest

from assay.formats import round_scalar


def test_random_number_decides_by_the_fraction() -> None:
    # 1.03125 lies a quarter of the way from 1.0 to 1.125.
    below, at = math.nextafter(0.25, 0), 0.25
    assert round_scalar(1.03125, "fp8_e4m3", rounding="stochastic", random=below) == 1.125
    assert round_scalar(1.03125, "fp8_e4m3", rounding="stochastic", random=at) == 1.0
    assert round_scalar(-1.03125, "fp8_e4m3", rounding="stochastic", random=below) == -1.125


def test_stochastic_mean_is_the_value() -> None:
    draws, fraction = 5000, 0.3
    source = random.Random(0)
    total = sum(
        round_scalar(1 + 0.125 * fraction, "fp8_e4m3", rounding="stochastic", random=source.random())
        for _ in range(draws)
    )
    bound = 6 * 0.125 * math.sqrt(fraction * (1 - fraction) / draws)
    assert abs(total / draws - (1 + 0.125 * fraction)) <= bound


@pytest.mark.parametrize("random_number", [None, 1.0, -0.1, math.nan])
def test_stochastic_needs_a_random_number(random_number: float | None) -> None:
    with pytest.raises(ValueError, match=r"needs random in \[0, 1\)"):
        round_scalar(1.0, "bf16", rounding="stochastic", random=random_number)


def test_other_modes_take_no_random_number() -> None:
    with pytest.raises(ValueError, match="only decides stochastic rounding"):
        round_scalar(1.0, "bf16", random=0.5)


def test_unknown_mode_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'toward_zero'\?.*Known: nearest_even"):
        round_scalar(1.0, "bf16", rounding="towards_zero")  # type: ignore[arg-type]
