"""Good and bad kernels for assert_within_budget, and what it says of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.budgets.assertion import BudgetReport
from assay.budgets.verdict import Judged
from assay.cases.attention.inputs import draw_inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def qkv(seed: int, distribution: str) -> tuple[Tensor, ...]:
    return tuple(x.to(BF16) for x in draw_inputs(distribution, (1, 2, 64, 32), seed)[:3])


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As in Llama: FP32 inside."""
    h = x.float()
    return (weight.float() * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def plain_layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight


def rows(seed: int, distribution: str) -> tuple[Tensor, ...]:
    drawn = draw_inputs(distribution, (1, 1, 32, 128), seed)
    return drawn.q[0, 0].to(BF16), drawn.k[0, 0, 0].to(BF16)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, None, 1e-5)


def truncated_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Right in FP32, then the lower bits are cut off instead of rounded."""
    exact = plain_rms_norm(x.float(), weight.float())
    return (exact.view(torch.int32) & -65536).view(FP32).to(BF16)


def bf16_accumulation(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for i in range(0, a.shape[1], 8):
        total = total + a[:, i : i + 8] @ b[i : i + 8]
    return total


def naive_softmax(x: Tensor) -> Tensor:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(AssertionError) as caught:
        call()
    return str(caught.value)


def verdicts(message: str) -> list[str]:
    """On max, RMSE, bits, bias and outward."""
    return next(line.split()[2:] for line in message.splitlines() if line.lstrip().startswith("budget"))


def only(report: BudgetReport) -> Judged:
    (judged,) = report.judged
    return judged
