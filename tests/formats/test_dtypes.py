"""Which dtype carries which format, checked against what torch itself says of its dtypes."""

from __future__ import annotations

import pytest
import torch

from assay.formats import NAMED, Format, get, storage_dtype
from assay.formats.dtypes import changes_nothing, holds, result_dtype

NATIVE = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("name", NAMED)
def test_storage_dtype_is_the_identical_one(name: str) -> None:
    dtype = storage_dtype(get(name))
    assert dtype == NATIVE.get(name)
    if dtype is not None:
        info = torch.finfo(dtype)
        assert (info.max, info.smallest_normal, info.eps) == (
            get(name).max,
            get(name).smallest_normal,
            get(name).epsilon,
        )


def test_storage_dtype_looks_at_the_values_not_the_name() -> None:
    assert storage_dtype(Format(exponent=5, mantissa=10, name="mine")) == torch.float16
    assert storage_dtype(Format(exponent=5, mantissa=10, subnormals=False)) is None


def test_holds() -> None:
    assert holds(torch.float32, get("tf32"))
    assert holds(torch.float16, get("fp8_e5m2"))
    assert not holds(torch.float16, get("bf16"))
    assert not holds(torch.bfloat16, get("fp16"))
    assert not holds(torch.float8_e4m3fn, Format(exponent=3, mantissa=2))  # it has infinities


def test_finer_formats_change_nothing_unless_they_saturate() -> None:
    assert changes_nothing(torch.bfloat16, get("fp32"), saturate=False)
    assert not changes_nothing(torch.bfloat16, get("fp32"), saturate=True)
    assert not changes_nothing(torch.bfloat16, get("fp16"), saturate=False)


@pytest.mark.parametrize(
    ("dtype", "name", "expected"),
    [
        (torch.float16, "bf16", torch.float32),
        (torch.bfloat16, "fp16", torch.float32),
        (torch.bfloat16, "fp8_e5m2", torch.bfloat16),
        (torch.float32, "e9m3", torch.float64),
        (torch.float64, "e9m3", torch.float64),
    ],
)
def test_result_dtype(dtype: torch.dtype, name: str, expected: torch.dtype) -> None:
    assert result_dtype(dtype, get(name), saturate=False) == expected
