from __future__ import annotations

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F

from assay import Plan, baseline_attention, golden_attention
from assay.cases.attention import golden as golden_module
from assay.cases.attention.golden import golden_gradients
from tests.cases.inputs import qkv


def mpmath_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> list[list[mpmath.mpf]]:
    """softmax(q·kᵀ·scale)·v with 60 digits, for one head."""
    rows = []
    for qi in q.tolist():
        scores = [mpmath.mpf(scale) * mpmath.fdot(qi, kj) for kj in k.tolist()]
        weights = [mpmath.exp(s) for s in scores]
        total = mpmath.fsum(weights)
        rows.append([mpmath.fdot(weights, column) / total for column in v.T.tolist()])
    return rows


@pytest.mark.parametrize(("spread", "keys"), [(1.0, 40), (8.0, 40), (1.0, 3), (1.0, 1)])
def test_own_error_is_a_few_ulps_of_fp64(spread: float, keys: int) -> None:
    """A score of size s is off by about s·ε, and so is its exponential: the bound grows with the logits."""
    q, k, v = (x.double() for x in qkv(8, keys, dim=16))
    q = q * spread
    with mpmath.workdps(60):
        exact = mpmath_attention(q[0, 0], k[0, 0], v[0, 0], 0.25)
        ours = golden_attention(q, k, v)[0, 0].tolist()
        worst = max(abs(a - b) for x, y in zip(ours, exact, strict=True) for a, b in zip(x, y, strict=True))
    largest_score = (q @ k.transpose(-1, -2)).abs().max().item() * 0.25
    bound = torch.finfo(torch.float64).eps * (largest_score + math.sqrt(keys) + 4) * v.abs().max().item()
    assert float(worst) <= bound


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(50, 40, batch=2, heads=4, kv_heads=2)
    whole = golden_attention(q, k, v, causal=True)
    monkeypatch.setattr(golden_module, "_SCORES_AT_ONCE", 7 * 40)
    torch.testing.assert_close(golden_attention(q, k, v, causal=True), whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_sdpa_in_fp64(causal: bool) -> None:
    q, k, v = (x.double() for x in qkv(32, 32, batch=2, heads=4, kv_heads=2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal, enable_gqa=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(golden_attention(q, k, v, causal=causal), out, rtol=0, atol=1e-14)
    theirs = torch.autograd.grad(out, leaves, grad)
    for ours, expected in zip(golden_gradients(q, k, v, grad, causal=causal), theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)


def test_masks_agree_with_sdpa_on_an_explicit_mask() -> None:
    """Causal and window, bottom-right aligned, written out element by element."""
    q, k, v = (x.double() for x in qkv(20, 33, heads=3))
    slopes = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    for causal, window in (
        (True, None),
        (False, (4, 2)),
        (True, (5, None)),
        (False, (None, 3)),
        (True, (6, 4)),
    ):
        mask = torch.full((3, 20, 33), -math.inf, dtype=torch.float64)
        for i in range(20):
            for j in range(33):
                ahead = j - (i + 13)
                left, right = window or (None, None)
                seen = not (causal and ahead > 0)
                seen = seen and (left is None or ahead >= -left) and (right is None or ahead <= right)
                if seen:
                    mask[:, i, j] = -slopes * abs(ahead)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        ours = golden_attention(q, k, v, causal=causal, window=window, alibi_slopes=slopes)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)


def test_baseline_in_fp64_is_golden() -> None:
    q, k, v = (x.double() for x in qkv(30, 50, heads=4, kv_heads=2, value_dim=12))
    ours = baseline_attention(q, k, v, plan=Plan.fp64(), causal=True)
    torch.testing.assert_close(ours, golden_attention(q, k, v, causal=True), rtol=0, atol=1e-15)
