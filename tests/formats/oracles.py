"""Roundings by other people: ml_dtypes and numpy to nearest even, gfloat in every direction."""

from __future__ import annotations

from typing import Any

import gfloat
import ml_dtypes
import numpy as np
from gfloat.types import Domain

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
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


def by_numpy(x: Array, name: str) -> Array:
    """`x`, float32, through numpy's or ml_dtypes' own cast."""
    assert x.dtype == np.float32
    with np.errstate(all="ignore"):
        return x.astype(NUMPY_DTYPES[name]).astype(np.float64)


def by_gfloat(x: Array, format: Format | str, rounding: str, saturate: bool) -> Array:
    """`x` rounded by gfloat, in float64, where its frexp and ldexp are exact."""
    with np.errstate(all="ignore"):
        return np.asarray(
            gfloat.round_ndarray(_gfloat_format(get(format)), np.float64(x), GFLOAT_MODES[rounding], saturate)
        )


def _gfloat_format(format: Format) -> gfloat.FormatInfo:
    return gfloat.FormatInfo(
        name=format.name,
        k=format.bits,
        precision=format.mantissa + 1,
        bias=2 ** (format.exponent - 1) - 1,
        is_signed=True,
        domain=Domain.Extended if format.infinities else Domain.Finite,
        has_nz=True,
        num_high_nans={"ieee": 2**format.mantissa - 1, "single": 1, "none": 0}[format.nan],
        has_subnormals=True,
        is_twos_complement=False,
    )
