"""The implementations that must agree, behind one signature, and what it means to agree.

A twin takes a numpy array (its dtype, float32 or float64, is the carrier) and returns float64, which
holds every result exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from assay.formats import Format, round_scalar
from assay.formats.modes import Rounding
from assay.formats.rounding import round_to

Array = npt.NDArray[Any]
Twin = Callable[[Array, "Format | str", Rounding, bool], Array]

DETERMINISTIC: tuple[Rounding, ...] = ("nearest_even", "nearest_away", "toward_zero", "up", "down")

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = (pytest.mark.gpu, NEEDS_GPU)


def scalar(x: Array, format: Format | str, rounding: Rounding, saturate: bool) -> Array:
    rounded = [round_scalar(v, format, rounding=rounding, saturate=saturate) for v in x.tolist()]
    return np.array(rounded, dtype=np.float64)


def on_cpu(x: Array, format: Format | str, rounding: Rounding, saturate: bool) -> Array:
    return round_to(torch.from_numpy(x), format, rounding, saturate).double().numpy()


def on_cuda(x: Array, format: Format | str, rounding: Rounding, saturate: bool) -> Array:
    return round_to(torch.from_numpy(x).cuda(), format, rounding, saturate).double().cpu().numpy()


TENSOR_TWINS = [pytest.param(on_cpu, id="cpu"), pytest.param(on_cuda, id="cuda", marks=GPU)]
TWINS = [pytest.param(scalar, id="scalar"), *TENSOR_TWINS]


def assert_same(actual: Array, expected: Array, x: Array) -> None:
    """Equal values, equal signs of zeros, NaN where NaN is; the first difference is shown."""
    with np.errstate(invalid="ignore"):
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        equal = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
    wrong = np.flatnonzero(~(equal | (np.isnan(actual) & np.isnan(expected))))
    if wrong.size:
        i = wrong[0]
        pytest.fail(
            f"{wrong.size} of {x.size} differ; first: x={float(x[i]).hex()} ({x[i]!r}) "
            f"gave {actual[i]!r}, expected {expected[i]!r}"
        )
