"""A linear layer whose three products take their operands in TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from assay.formats.rounding import round_to


def tf32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·weightᵀ + bias for FP32 tensors, whose products, in backward too, take their operands in TF32.

    On CUDA by the tensor cores, elsewhere by rounding the operands (to nearest even) and multiplying them in FP32.
    """
    out: Tensor = _apply(x, weight, bias)
    return out


class _Tf32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight = _operand(x), _operand(weight)
        ctx.save_for_backward(x, weight)
        with _tf32_on_cuda():
            return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        low = _operand(grad)
        dx = dweight = dbias = None
        with _tf32_on_cuda():
            if ctx.needs_input_grad[0]:
                dx = low @ weight
            if ctx.needs_input_grad[1]:
                dweight = low.reshape(-1, low.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            dbias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return dx, dweight, dbias


_apply = torch.compiler.disable(_Tf32Linear.apply)
"""Not traced: its rounding would be compiled anew for every layer."""


def _operand(x: Tensor) -> Tensor:
    return x if x.is_cuda else round_to(x, "tf32")


@contextmanager
def _tf32_on_cuda() -> Iterator[None]:
    backend: Any = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        yield
    finally:
        backend.fp32_precision = before
