"""The derived figures of a format against ml_dtypes and numpy; what a format refuses to be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from assay.formats import Format, get

from .oracles import NUMPY_DTYPES
from .probes import code_points

WITH_FINFO = NUMPY_DTYPES | {"fp32": np.float32, "fp64": np.float64}


@pytest.mark.parametrize("name", WITH_FINFO)
def test_figures_are_those_of_finfo(name: str) -> None:
    format, info = get(name), ml_dtypes.finfo(WITH_FINFO[name])
    assert format.max == float(info.max)
    assert format.smallest_normal == float(info.smallest_normal)
    assert format.smallest == float(info.smallest_subnormal)
    assert format.epsilon == float(info.eps)
    assert format.bits == info.bits
    assert format.mantissa == info.nmant
    assert format.min_exponent == info.minexp


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_figures_are_those_of_the_codes(name: str) -> None:
    format, values = get(name), code_points(name)
    finite = values[np.isfinite(values)]
    assert format.max == finite.max()
    assert format.smallest == finite[finite > 0].min()
    assert 2.0**format.max_exponent <= format.max < 2.0 ** (format.max_exponent + 1)
    assert format.infinities == bool(np.isinf(values).any())
    assert (format.nan != "none") == bool(np.isnan(values).any())


def test_without_subnormals_the_smallest_is_normal() -> None:
    assert Format(exponent=5, mantissa=10, subnormals=False).smallest == 2.0**-14


def test_replace_makes_the_name_anew() -> None:
    assert get("bf16").replace(mantissa=9).name == "e8m9"
    assert str(get("bf16").replace(mantissa=9, name="mine")) == "mine"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exponent": 0, "mantissa": 3}, "exponent must be 1 to 11 bits .* got 0"),
        ({"exponent": 12, "mantissa": 3}, "got 12"),
        ({"exponent": 5, "mantissa": 53}, "mantissa must be 0 to 52 bits .* got 53"),
        ({"exponent": 5, "mantissa": -1}, "got -1"),
        ({"exponent": 5, "mantissa": 2, "nan": "many"}, "nan must be"),
        ({"exponent": 5, "mantissa": 2, "nan": "none"}, "Set infinities=False"),
        ({"exponent": 5, "mantissa": 2, "infinities": False}, "Use nan='single' or nan='none'"),
        ({"exponent": 1, "mantissa": 2}, "no finite normal number"),
        ({"exponent": 1, "mantissa": 0, "infinities": False, "nan": "single"}, "no normal number left"),
        ({"exponent": 11, "mantissa": 2, "infinities": False, "nan": "none"}, "reach 2\\^1024"),
    ],
)
def test_refusals_say_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Format(**fields)
