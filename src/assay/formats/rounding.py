"""Rounding tensors to a format: the public function. It checks, chooses dtypes, and picks the backend.

The rules (signed zeros, NaN, overflow, saturation, flushing) are those of `round_scalar`; see there.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from assay.formats.catalog import get
from assay.formats.dtypes import changes_nothing, check_carrier, holds, result_dtype, working_dtype
from assay.formats.modes import Rounding, check_rounding
from assay.formats.spec import Format
from assay.formats.torch_rounding import Request, round_flat

__all__ = ["round_to"]


def round_to(
    x: Tensor,
    format: Format | str,
    rounding: Rounding = "nearest_even",
    saturate: bool = False,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Round every value of `x` to `format`. Always a new, contiguous tensor of x's shape; `x` is not changed.

    Args:
        x: A floating-point tensor of any shape, on any device.
        format: A `Format`, a name such as "bf16" or "fp8_e4m3", or any "eXmY".
        rounding: nearest_even, nearest_away, toward_zero, up, down or stochastic.
        saturate: Whether values beyond the range, infinities included, become the largest finite value.
        generator: For stochastic rounding only; on the device of `x`. A seeded one makes it repeatable.
        dtype: The dtype of the result, which must hold every value of the format. By default x's own
            if it does, otherwise float32 or float64: bf16 values rounded to fp16 come as float32.

    Rounding is a step function and has no useful derivative: the result never requires grad.
    """
    format = get(format)
    _check(x, rounding, generator)
    flat = x.detach().reshape(-1).contiguous()  # an expanded or strided vector stays one under reshape
    if changes_nothing(x.dtype, format, saturate):
        result = _checked_dtype(dtype, x.dtype, format)
        return flat.to(result, copy=True).view(x.shape)
    result = _checked_dtype(dtype, result_dtype(x.dtype, format, saturate), format)
    if flat.numel() == 0:
        return torch.empty(x.shape, dtype=result, device=x.device)
    working = working_dtype(x.dtype, format)
    request = Request(format, rounding, saturate, generator)
    kernel = _kernel_module() if x.is_cuda else None
    if kernel is not None:
        rounded: Tensor = kernel.round_flat(flat, request, working, result)
    else:
        rounded = round_flat(flat, request, working, result)
    return rounded.view(x.shape)


def _check(x: Tensor, rounding: str, generator: torch.Generator | None) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a torch.Tensor, got {type(x).__name__}. Use round_scalar for a float.")
    check_carrier(x.dtype)
    check_rounding(rounding)
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {type(generator).__name__}.")
    if rounding != "stochastic":
        raise ValueError(f"A generator is only used by rounding='stochastic', got rounding={rounding!r}. Leave it out.")
    if generator.device.type != x.device.type:
        raise ValueError(
            f"The generator must be on the device of x ({x.device}), got one on {generator.device}. "
            f"Make it with torch.Generator('{x.device.type}')."
        )


def _checked_dtype(dtype: torch.dtype | None, default: torch.dtype, format: Format) -> torch.dtype:
    if dtype is None or dtype == default:
        return default
    check_carrier(dtype)
    if not holds(dtype, format):
        raise ValueError(
            f"dtype must hold every value of {format}, but {dtype} does not. Use {default}, or leave dtype out."
        )
    return dtype


@lru_cache(maxsize=1)
def _kernel_module() -> ModuleType | None:
    """The Triton kernel, imported when the first CUDA tensor comes; None where Triton is not installed."""
    try:
        return importlib.import_module("assay.formats.triton_rounding")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return None  # the plain torch path gives the same values, only slower
