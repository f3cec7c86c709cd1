"""Which torch dtypes can carry the values of which format."""

from __future__ import annotations

from functools import lru_cache

import torch

from assay.formats.catalog import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FP64
from assay.formats.spec import Format

_FORMAT_OF = {
    torch.float8_e4m3fn: FP8_E4M3,
    torch.float8_e5m2: FP8_E5M2,
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float32: FP32,
    torch.float64: FP64,
}


def format_of(dtype: torch.dtype) -> Format:
    """The format of a floating dtype of torch's."""
    if dtype not in _FORMAT_OF:
        raise ValueError(f"{dtype} is no floating dtype that Assay knows: {', '.join(map(str, _FORMAT_OF))}.")
    return _FORMAT_OF[dtype]


@lru_cache(maxsize=1024)
def storage_dtype(format: Format) -> torch.dtype | None:
    """The native torch dtype with exactly the values of `format`, or None."""
    for dtype, native in _FORMAT_OF.items():
        if format.replace(name="same") == native.replace(name="same"):
            return dtype
    return None


def check_carrier(dtype: torch.dtype) -> None:
    """Raise a ValueError unless `dtype` is a floating-point dtype that can be rounded."""
    if dtype not in _FORMAT_OF:
        known = ", ".join(str(d).removeprefix("torch.") for d in _FORMAT_OF)
        raise ValueError(f"Only {known} tensors can be rounded, got {dtype}. Convert x first, e.g. x.float().")


@lru_cache(maxsize=1024)
def holds(dtype: torch.dtype, format: Format) -> bool:
    """Whether every value of `format` is a value of `dtype`."""
    carrier = _FORMAT_OF[dtype]
    return (
        carrier.mantissa >= format.mantissa
        and carrier.max >= format.max
        and carrier.smallest <= format.smallest
        and (carrier.infinities or not format.infinities)
    )


@lru_cache(maxsize=1024)
def changes_nothing(dtype: torch.dtype, format: Format, saturate: bool) -> bool:
    """Whether rounding any tensor of `dtype` to `format` gives back the same values."""
    carrier = _FORMAT_OF[dtype]
    return (
        format.mantissa >= carrier.mantissa
        and format.max >= carrier.max
        and format.smallest <= carrier.smallest
        and (not carrier.infinities or (format.infinities and not saturate))
    )


@lru_cache(maxsize=1024)
def result_dtype(dtype: torch.dtype, format: Format, saturate: bool) -> torch.dtype:
    """`dtype` itself if it holds the results of rounding to `format`, else float32 or float64.

    Rounding can leave the range of its input: the largest fp16 value, 65504, is 65536 in bf16.
    """
    if changes_nothing(dtype, format, saturate):
        return dtype
    wider = (dtype, torch.float32, torch.float64) if dtype != torch.float64 else (dtype,)
    return next(d for d in wider if holds(d, format))


@lru_cache(maxsize=1024)
def working_dtype(dtype: torch.dtype, format: Format) -> torch.dtype:
    """The dtype to round in: it holds both the input and the result."""
    if dtype != torch.float64 and holds(torch.float32, format):
        return torch.float32
    return torch.float64
