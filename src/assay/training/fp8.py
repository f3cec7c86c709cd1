"""A linear layer whose three products take FP8: E4M3 for x and the weight, E5M2 for the gradient that comes in.

Each tensor has one scale, from the largest magnitude it has at that moment (current scaling, no history). Products add
up in FP32. On CUDA they are those of `torch._scaled_mm` where it takes the shape and the device has FP8; elsewhere the
same FP8 values are multiplied in FP32, so that only the order and width of the sums differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from assay.formats.catalog import FP8_E4M3, FP8_E5M2
from assay.formats.dtypes import storage_dtype
from assay.formats.rounding import round_to
from assay.formats.spec import Format

RESULT = torch.bfloat16
"""The dtype an FP8 layer leaves its result in."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_MULTIPLE = 16
"""What `torch._scaled_mm` wants the columns and rows of its second matrix to be a multiple of."""


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·weightᵀ + bias in bf16, for x (..., in) and weight (out, in) in any float dtype; gradients in the same way.

    The gradient of x has x's dtype, that of the weight the weight's; that of the bias is summed without FP8.
    """
    out: Tensor = _apply(x, weight, bias)
    return out


def quantize(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """FP8 values and the FP32 scale that multiplies them back; the largest finite magnitude meets the format's.

    NaN and infinity do not set the scale of the others; they stay what the format has for them (E4M3: NaN).
    """
    largest = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax().float()
    # At least the smallest normal number: a tensor of zeros, or of subnormals, must not divide by zero.
    scale = (largest / format.max).clamp(min=_SMALLEST_SCALE)
    return round_to(x.float() / scale, format, dtype=storage_dtype(format)), scale


class _Fp8Linear(torch.autograd.Function):
    """Keeps x and the weight for backward as FP8, a quarter of FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, x_scale = quantize(x.reshape(-1, x.shape[-1]), FP8_E4M3)
        matrix, weight_scale = quantize(weight, FP8_E4M3)
        ctx.save_for_backward(rows, x_scale, matrix, weight_scale)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        out = _product(rows, matrix, (x_scale, weight_scale), RESULT, bias)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, x_scale, matrix, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad = grad.reshape(-1, grad.shape[-1])
        low, scale = quantize(grad, FP8_E5M2)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = _product(low, matrix.t(), (scale, weight_scale), x_dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            dweight = _product(low.t(), rows.t(), (scale, x_scale), weight_dtype)
        if ctx.needs_input_grad[2]:
            dbias = grad.float().sum(0).to(bias_dtype)
        return dx, dweight, dbias


_apply = torch.compiler.disable(_Fp8Linear.apply)
"""Not traced: its rounding would be compiled anew for every layer."""


def _product(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a·bᵀ times both scales, plus the bias as bf16, rounded once to `dtype`; for FP8 a (M, K) and b (N, K)."""
    bias = None if bias is None else bias.to(RESULT)
    if _has_kernel(a.device) and b.shape[0] % _MULTIPLE == 0 and b.shape[1] % _MULTIPLE == 0:
        # The first matrix by rows, the second by columns: both with K contiguous.
        return torch._scaled_mm(
            a.contiguous(), b.contiguous().t(), scale_a=scales[0], scale_b=scales[1], bias=bias, out_dtype=dtype
        )
    out = (a.float() @ b.float().t()) * scales[0] * scales[1]
    return (out if bias is None else out + bias).to(dtype)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
