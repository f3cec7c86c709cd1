"""What must hold for every format, mode and input: the tensor code equals the specification, and more."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.formats import NAMED, Format
from assay.formats.modes import Rounding
from assay.formats.rounding import round_to

from .probes import random_bits, special_values
from .twins import DETERMINISTIC, Array, assert_same, on_cpu, scalar

CARRIERS = [np.float32, np.float64]
FORMATS = [
    *NAMED.values(),
    Format(exponent=5, mantissa=3, subnormals=False),
    Format(exponent=8, mantissa=10, subnormals=False),
    Format(exponent=8, mantissa=23, subnormals=False),
    Format(exponent=8, mantissa=4, infinities=False, nan="none"),
    Format(exponent=1, mantissa=2, infinities=False, nan="none"),
    Format(exponent=3, mantissa=0, infinities=False, nan="single"),
    Format(exponent=8, mantissa=0),
    Format(exponent=5, mantissa=30),
    Format(exponent=10, mantissa=52),
    Format(exponent=11, mantissa=20),
]


@dataclass(frozen=True)
class Problem:
    """A format, a mode and inputs, as hypothesis draws them."""

    format: Format
    rounding: Rounding
    saturate: bool
    x: Array


@st.composite
def formats(draw: st.DrawFn) -> Format:
    special = draw(st.sampled_from(["ieee", "single", "none"]))
    smallest, largest = {"ieee": (2, 11), "single": (2, 10), "none": (1, 10)}[special]
    return Format(
        exponent=draw(st.integers(smallest, largest)),
        mantissa=draw(st.integers(0, 52)),
        infinities=special == "ieee",
        nan=special,  # type: ignore[arg-type]
        subnormals=draw(st.booleans()),
    )


@st.composite
def values_near(draw: st.DrawFn, format: Format) -> float:
    """A few bits longer than the format's mantissa, inside its range or a little outside."""
    significand = draw(st.integers(-(2 ** (format.mantissa + 3)), 2 ** (format.mantissa + 3)))
    lowest = format.min_exponent - format.mantissa - 4
    scale = draw(st.integers(lowest, format.max_exponent - format.mantissa - 1))
    try:
        return math.ldexp(float(significand), scale)
    except OverflowError:  # beyond FP64: the format has all its exponents
        return math.copysign(math.inf, significand)


@st.composite
def problems(draw: st.DrawFn, carrier: type[np.floating]) -> Problem:
    format = draw(formats())
    width = np.dtype(carrier).itemsize
    patterns = draw(st.lists(st.integers(0, 2 ** (8 * width) - 1), min_size=1, max_size=15))
    near = draw(st.lists(values_near(format), min_size=1, max_size=15))
    bits = np.array(patterns, dtype=f"u{width}").view(carrier)
    with np.errstate(all="ignore"):
        x = np.concatenate([bits, np.array(near).astype(carrier)])
    return Problem(format, draw(st.sampled_from(DETERMINISTIC)), draw(st.booleans()), x)


@settings(max_examples=400, deadline=None)
@given(problems(np.float32))
def test_fp32_tensors_follow_the_specification(problem: Problem) -> None:
    check_against_specification(problem)


@settings(max_examples=400, deadline=None)
@given(problems(np.float64))
def test_fp64_tensors_follow_the_specification(problem: Problem) -> None:
    check_against_specification(problem)


def check_against_specification(problem: Problem) -> None:
    how = (problem.format, problem.rounding, problem.saturate)
    assert_same(on_cpu(problem.x, *how), scalar(problem.x, *how), problem.x)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f}-{f.nan}-{f.subnormals}")
def test_properties(format: Format, rounding: Rounding, carrier: type[np.floating]) -> None:
    spread = np.random.default_rng(3).standard_normal(3000) * 2.0 ** np.arange(-30, 30).repeat(50)
    x = np.concatenate([random_bits(2000, carrier), spread.astype(carrier), special_values(carrier)])
    once = on_cpu(x, format, rounding, False)
    assert_same(on_cpu(once, format, rounding, False), once, x)  # idempotent
    mirrored: Rounding = {"up": "down", "down": "up"}.get(rounding, rounding)  # type: ignore[assignment]
    assert_same(-on_cpu(-x, format, mirrored, False), once, x)  # odd
    ascending = np.sort(x[~np.isnan(x)])
    saturated = on_cpu(ascending, format, rounding, True)
    assert (saturated[1:] >= saturated[:-1]).all()  # monotone


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f}-{f.nan}-{f.subnormals}")
def test_directed_results_enclose_the_value(format: Format, carrier: type[np.floating]) -> None:
    subnormal = format.replace(subnormals=True)  # flushing may cross the value
    x = random_bits(3000, carrier)
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = x[np.abs(x).astype(np.float64) <= format.max]
    down, up = on_cpu(x, subnormal, "down", False), on_cpu(x, subnormal, "up", False)
    nearest, cut = on_cpu(x, subnormal, "nearest_even", False), on_cpu(x, subnormal, "toward_zero", False)
    assert ((down <= x) & (x <= up)).all()
    assert ((nearest == down) | (nearest == up)).all()
    assert (cut == np.where(x > 0, down, up)).all()


@pytest.mark.parametrize("rounding", [*DETERMINISTIC, "stochastic"])
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f}-{f.nan}-{f.subnormals}")
def test_nan_stays_nan_whatever_its_payload(format: Format, rounding: Rounding, saturate: bool) -> None:
    bits = torch.tensor([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    x = torch.cat([bits, bits | -(1 << 31)]).view(torch.float32)
    assert x.isnan().all()
    assert round_to(x, format, rounding, saturate).isnan().all()
    assert round_to(x.double(), format, rounding, saturate).isnan().all()
