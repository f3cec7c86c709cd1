"""Roundings by other people: ml_dtypes and numpy to nearest even, gfloat in every direction."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from assay.formats import Format, get

from .twins import Array

# numpy dtypes with the values of our formats. Only fp32 may be cast to them: from fp64, ml_dtypes goes
# through fp32 and rounds twice.
NUMPY_DTYPES: dict[str, Any] = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "e3m4": ml_dtypes.float8_e3m4,
    "e4m3": ml_dtypes.float8_e4m3,
}

GFLOAT_MODES = {
    "nearest_even": "TiesToEven",
    "nearest_away": "TiesToAway",
    "toward_zero": "TowardZero",
    "up": "TowardPositive",
    "down": "TowardNegative",
}


def by_numpy(x: Array, name: str) -> Array:
    """`x`, float32, through numpy's or ml_dtypes' own cast."""
    assert x.dtype == np.float32
    with np.errstate(all="ignore"):
        return x.astype(NUMPY_DTYPES[name]).astype(np.float64)


def by_gfloat(x: Array, format: Format | str, rounding: str, saturate: bool) -> Array:
    """`x` rounded by gfloat, in float64, where its frexp and ldexp are exact."""
    gfloat = pytest.importorskip("gfloat")  # a GPU box may lack it; `make test` installs it
    mode = gfloat.RoundMode[GFLOAT_MODES[rounding]]
    with np.errstate(all="ignore"):
        rounded = gfloat.round_ndarray(_gfloat_format(gfloat, get(format)), np.float64(x), mode, saturate)
        return np.asarray(rounded)


def _gfloat_format(gfloat: Any, format: Format) -> Any:
    domain = gfloat.types.Domain
    return gfloat.FormatInfo(
        name=format.name,
        k=format.bits,
        precision=format.mantissa + 1,
        bias=2 ** (format.exponent - 1) - 1,
        is_signed=True,
        domain=domain.Extended if format.infinities else domain.Finite,
        has_nz=True,
        num_high_nans={"ieee": 2**format.mantissa - 1, "single": 1, "none": 0}[format.nan],
        has_subnormals=True,
        is_twos_complement=False,
    )
