"""The plain call on the CPU: torch's SDPA itself, where it gives what we promise. No operator of ours in between."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from assay.flash.cpu_aten import ROWS


def takes(q: Tensor, k: Tensor, v: Tensor, right: int | None, bias: Tensor | None = None) -> bool:
    """Whether SDPA computes softmax(scale · q·kᵀ + bias)·v for these as well as our path does.

    Its causal mask begins at the top left, which is ours only for as many queries as keys; in bf16 its backward sums
    dK and dV up in bf16, over blocks of rows and over a group's heads; in fp16 it is slow; it takes no empty tensors,
    and one head dimension. It takes a mask or a bias without a gradient, not together with causal; under it a NaN in
    a hidden key reaches every row, so there the keys are looked at.
    """
    if q.device.type != "cpu" or q.shape[3] != v.shape[3] or not (q.shape[2] and k.shape[2] and q.shape[0]):
        return False
    if right is not None and (right != 0 or q.shape[2] != k.shape[2]):
        return False
    if bias is not None and (right is not None or not _harmless(bias, k, v)):
        return False
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return False
    if q.dtype != torch.bfloat16:
        return q.dtype != torch.float16
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return not recorded or (q.shape[1] == k.shape[1] and q.shape[2] <= ROWS)


def attend(
    q: Tensor, k: Tensor, v: Tensor, right: int | None, scale: float | None, bias: Tensor | None = None
) -> Tensor:
    """The output."""
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, bias, is_causal=right is not None, scale=scale, enable_gqa=grouped)


def _harmless(bias: Tensor, k: Tensor, v: Tensor) -> bool:
    """A compiler cannot look at values."""
    if bias.requires_grad or bias.dtype not in (torch.bool, k.dtype) or torch.compiler.is_compiling():
        return False
    return bool((k.detach().sum() + v.detach().sum()).isfinite())
