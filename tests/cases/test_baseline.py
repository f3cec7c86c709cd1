from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from assay import Plan, baseline_attention, deviation, golden_attention, round_to
from assay.cases.attention import baseline as baseline_module
from assay.cases.attention.golden import golden_gradients
from tests.cases.inputs import qkv


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Baseline attention as anybody writes it, in the dtype of its inputs."""
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (p / p.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_every_step_like_plain_torch(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(64, 80, heads=2, dim=32))
    ours = baseline_attention(q, k, v, plan=Plan.uniform("bf16" if dtype == torch.bfloat16 else "fp16"))
    expected = plain(q, k, v)
    assert ours.dtype == dtype
    moved = (ours != expected).any(-1).double().mean().item()
    assert moved <= 0.1  # the order of FP32 sums moves a rounding in a few rows
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, expected, rtol=4 * eps, atol=4 * eps)


def test_is_not_sdpa_math_which_computes_in_fp32() -> None:
    q, k, v = (x.bfloat16() for x in qkv(256, 256, heads=2, dim=64))
    golden = golden_attention(q, k, v)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        math_rmse = deviation(F.scaled_dot_product_attention(q, k, v), golden).rmse
    ours = deviation(baseline_attention(q, k, v, plan=Plan.uniform("bf16")), golden).rmse
    assert ours > 1.5 * math_rmse


def test_row_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(50, 40, heads=4, kv_heads=2)
    whole = baseline_attention(q, k, v, plan=Plan.uniform("bf16"), causal=True)
    monkeypatch.setitem(baseline_module._SCORES_AT_ONCE, "cpu", 7 * 40)
    pieces = baseline_attention(q, k, v, plan=Plan.uniform("bf16"), causal=True)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=2**-7)


@pytest.mark.parametrize(("fmt", "budget"), [("fp64", 1e-13), ("fp32", 3e-6)])
def test_gradients_are_golden_in_wide_formats(fmt: str, budget: float) -> None:
    q, k, v = (x.double() for x in qkv(30, 40, heads=4, kv_heads=2, value_dim=20))
    leaves = [round_to(x, fmt).requires_grad_() for x in (q, k, v)]
    out = baseline_attention(*leaves, plan=Plan.uniform(fmt), causal=True)
    grad = round_to(torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), fmt)
    golden = golden_gradients(leaves[0], leaves[1], leaves[2], grad, causal=True)
    for ours, truth in zip(torch.autograd.grad(out, leaves, grad), golden, strict=True):
        assert deviation(ours, truth).max <= budget * max(1.0, math.sqrt(30))


def test_bf16_gradients_lie_on_the_grid_and_near_golden() -> None:
    q, k, v = (round_to(x, "bf16").requires_grad_() for x in qkv(64, 64, dim=32))
    out = baseline_attention(q, k, v, plan=Plan.uniform("bf16"))
    grad = round_to(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)), "bf16")
    golden = golden_gradients(q, k, v, grad)
    for ours, truth in zip(torch.autograd.grad(out, (q, k, v), grad), golden, strict=True):
        assert torch.equal(ours, round_to(ours, "bf16"))
        assert 0 < deviation(ours, truth).relative < 8 * 2**-8  # a handful of roundings of 2^-8 each
