"""Cases that emulators and casts elsewhere are known to get wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from assay.formats import Format
from assay.formats.modes import Rounding
from assay.formats.rounding import round_to

from .twins import TWINS, Array, Twin, assert_same


def check(twin: Twin, format: Format | str, cases: dict[float, float], **how: object) -> None:
    rounding: Rounding = how.get("rounding", "nearest_even")  # type: ignore[assignment]
    x: Array = np.array(list(cases), dtype=np.float64)
    expected = np.array(list(cases.values()))
    saturate = bool(how.get("saturate", False))
    assert_same(twin(x, format, rounding, saturate), expected, x)
    assert_same(twin(-x, format, rounding, saturate), -expected, -x)


@pytest.mark.parametrize("twin", TWINS)
def test_fp16_overflow_starts_at_65520(twin: Twin) -> None:
    below = math.nextafter(65520.0, 0.0)
    beyond = {65504.0: 65504.0, 65519.0: 65504.0, below: 65504.0, 65520.0: math.inf, 65535.0: math.inf}
    check(twin, "fp16", beyond | {65536.0: math.inf, 131071.0: math.inf, 1e300: math.inf})
    check(twin, "fp16", dict.fromkeys(beyond, 65504.0) | {math.inf: 65504.0}, saturate=True)
    check(twin, "fp16", dict.fromkeys(beyond, 65504.0) | {math.inf: math.inf}, rounding="toward_zero")


@pytest.mark.parametrize("twin", TWINS)
def test_fp8_e4m3_overflow(twin: Twin) -> None:
    # 464 is the tie between 448 and the 480 that would come next; 448 has the even mantissa.
    above = math.nextafter(464.0, 500.0)
    check(twin, "fp8_e4m3", {448.0: 448.0, 464.0: 448.0, above: math.nan, 480.0: math.nan, 1e9: math.nan})
    check(twin, "fp8_e4m3", {464.0: math.nan, math.inf: math.nan}, rounding="nearest_away")
    check(twin, "fp8_e4m3", {449.0: 448.0, 1e9: 448.0, math.inf: math.nan}, rounding="toward_zero")
    check(twin, "fp8_e4m3", {449.0: 448.0, 1e9: 448.0, math.inf: 448.0}, saturate=True)


@pytest.mark.parametrize("twin", TWINS)
def test_fp8_e5m2_overflow(twin: Twin) -> None:
    check(twin, "fp8_e5m2", {57344.0: 57344.0, 61439.0: 57344.0, 61440.0: math.inf, math.inf: math.inf})
    check(twin, "fp8_e5m2", {61440.0: 57344.0, math.inf: 57344.0}, saturate=True)


@pytest.mark.parametrize("twin", TWINS)
def test_directed_overflow_depends_on_the_sign(twin: Twin) -> None:
    x = np.array([1e9, -1e9, math.inf, -math.inf])
    for format, largest, special in (("fp8_e5m2", 57344.0, math.inf), ("fp8_e4m3", 448.0, math.nan)):
        infinite = [special, -special]
        assert_same(twin(x, format, "up", False), np.array([special, -largest, *infinite]), x)
        assert_same(twin(x, format, "down", False), np.array([largest, -special, *infinite]), x)


@pytest.mark.parametrize("twin", TWINS)
def test_subnormals_round_to_their_own_spacing(twin: Twin) -> None:
    tiny = 2.0**-24  # of fp16
    cases = {tiny: tiny, 0.5 * tiny: 0.0, 0.50001 * tiny: tiny, 1.5 * tiny: 2 * tiny, 2.5 * tiny: 2 * tiny}
    check(twin, "fp16", cases)
    check(twin, "fp16", {0.5 * tiny: tiny, 0.49 * tiny: 0.0, 2.5 * tiny: 3 * tiny}, rounding="nearest_away")
    edge = 2.0**-14 - 2.0**-26  # rounds up into the smallest normal
    check(twin, "fp16", {edge: 2.0**-14})


@pytest.mark.parametrize("twin", TWINS)
def test_flushed_subnormals(twin: Twin) -> None:
    format = Format(exponent=5, mantissa=10, subnormals=False)
    check(twin, format, {2.0**-14: 2.0**-14, 2.0**-15: 0.0, 2.0**-14 - 2.0**-24: 0.0, 2.0**-60: 0.0})
    check(twin, format, {2.0**-14 - 2.0**-26: 2.0**-14})  # a normal number after rounding


@pytest.mark.parametrize("twin", TWINS)
def test_zeros_keep_their_sign(twin: Twin) -> None:
    x = np.array([0.0, -0.0, 1e-30, -1e-30])
    for format in ("fp16", "fp8_e4m3", "fp4_e2m1"):
        assert_same(twin(x, format, "nearest_even", False), np.array([0.0, -0.0, 0.0, -0.0]), x)
    x = np.array([-1e-30])
    assert_same(twin(x, "fp8_e4m3", "up", False), np.array([-0.0]), x)
    assert_same(twin(x, "fp8_e4m3", "down", False), np.array([-(2.0**-9)]), x)


@pytest.mark.parametrize("twin", TWINS)
def test_fp64_is_rounded_once(twin: Twin) -> None:
    # Through fp32 these become ties and go down; torch and ml_dtypes casts do that.
    check(twin, "bf16", {1 + 2.0**-8 + 2.0**-40: 1 + 2.0**-7})
    check(twin, "fp16", {1 + 2.0**-11 + 2.0**-40: 1 + 2.0**-10})
    check(twin, "fp8_e4m3", {1 + 2.0**-4 + 2.0**-40: 1.125})
    check(twin, "fp16", {65520 - 2.0**-30: 65504.0})


@pytest.mark.parametrize("format", ["bf16", "fp16", "tf32", "fp8_e4m3", "fp8_e5m2", "e7m10"])
def test_flushing_the_cpu_subnormals_changes_nothing(format: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (5000,), dtype=torch.int32)
    x = torch.cat([bits, bits & -0x7F800001]).view(torch.float32)  # the second half is all subnormal
    expected = round_to(x, format).view(torch.int32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        actual = round_to(x, format).view(torch.int32)
    finally:
        torch.set_flush_denormal(False)
    nan = x.isnan()
    assert torch.equal(actual[~nan], expected[~nan])
