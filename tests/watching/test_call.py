"""Plain attention of a caught call, against `golden_attention` in FP64 and torch; its figures against `deviation`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

import assay
from assay.cases.attention.golden import golden_attention, golden_gradients
from assay.formats.catalog import BF16
from assay.watching import call as calls
from assay.watching.call import AttentionCall, plain, plain_gradients
from assay.watching.figures import figures


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(heads: int = 4, kv_heads: int = 2, queries: int = 9, keys: int = 13) -> dict[str, Any]:
    return {
        "q": draw(2, heads, queries, 8),
        "k": draw(2, kv_heads, keys, 8, seed=1),
        "v": draw(2, kv_heads, keys, 8, seed=2),
    }


MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "causal": ({"right": 0}, {"causal": True}),
    "window": ({"left": 3, "right": 1}, {"window": (3, 1)}),
    "bias": ({"bias": draw(1, 4, 9, 13, seed=3)}, {"bias": draw(1, 4, 9, 13, seed=3)}),
    "hidden": ({"bias": draw(2, 1, 9, 13, seed=3) > 0}, {"bias": (draw(2, 1, 9, 13, seed=3) > 0)}),
}


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("name", MASKS)
def test_in_fp64_it_is_golden(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calls._SCORES_AT_ONCE, "cpu", at_once)
    tensors, (mine, theirs) = qkv(), MASKS[name]
    call = AttentionCall(**tensors, scale=0.3, **mine)
    expected = golden_attention(**tensors, scale=0.3, **theirs)
    torch.testing.assert_close(plain(call), expected, rtol=1e-12, atol=1e-13)
    grad = draw(*expected.shape, seed=5)
    for ours, golden in zip(
        plain_gradients(call, grad), golden_gradients(**tensors, grad=grad, scale=0.3, **theirs), strict=True
    ):
        torch.testing.assert_close(ours, golden, rtol=1e-11, atol=1e-12)


def test_sinks_softcap_and_slopes_against_our_kernels() -> None:
    tensors = {name: x.float() for name, x in qkv().items()}
    how: dict[str, Any] = {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    ours = assay.flash_attention(**tensors, causal=True, **how)
    call = AttentionCall(**tensors, scale=8**-0.5, right=0, **how)
    torch.testing.assert_close(plain(call), ours, rtol=1e-4, atol=1e-5)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    ours = assay.flash_attention(**tensors, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(
        plain(AttentionCall(**tensors, scale=8**-0.5, right=0, slopes=slopes)), ours, rtol=1e-4, atol=1e-5
    )


def test_in_bf16_it_is_what_torch_writes_down() -> None:
    q, k, v = (draw(2, 4, 9, 8, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    p = torch.softmax((q @ k.transpose(-1, -2)) * 0.25, -1)
    assert torch.equal(plain(AttentionCall(q=q, k=k, v=v, scale=0.25)), p @ v)


def test_a_row_that_sees_no_key_gives_0_and_no_gradient() -> None:
    call = AttentionCall(**qkv(queries=13, keys=9), scale=1.0, right=0)
    assert (plain(call)[:, :, :4] == 0).all()
    dq, _, _ = plain_gradients(call, draw(2, 4, 13, 8))
    assert (dq[:, :, :4] == 0).all()
    assert dq.isfinite().all()


def test_figures_are_those_of_deviation_head_by_head() -> None:
    golden = draw(2, 3, 50, 8)
    actual = (golden + 1e-3 * draw(2, 3, 50, 8, seed=9)).to(torch.bfloat16)
    found = figures(actual, golden, BF16)
    for head in range(4):
        x, y = (actual, golden) if head == 3 else (actual[:, head], golden[:, head])
        expected = assay.deviation(x.contiguous(), y.contiguous(), format="bf16")
        for name in ("max", "mean", "std", "rmse", "relative", "bias", "ulp_max", "ulp_mean", "cosine", "sqnr"):
            assert found[name][head] == pytest.approx(getattr(expected, name), rel=1e-9), name
        assert (found["bias_low"][head], found["bias_high"][head]) == pytest.approx(expected.bias_interval, rel=1e-6)
        distance = scipy.stats.wasserstein_distance(x.double().flatten(), y.flatten())
        assert found["w1"][head] == pytest.approx(distance, rel=1e-9)
        assert found["q99"][head] == pytest.approx(torch.quantile((x - y).abs().flatten(), 0.99).item())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_stopped_being_a_number(bad: float) -> None:
    golden = draw(1, 2, 5, 4)
    actual = golden.clone()
    actual[0, 1, 2, 3] = bad
    found = figures(actual, golden, BF16)
    assert found["nonfinite"] == [0, 1, 1]
    assert found["max"] == [0, math.inf, math.inf]
    assert found["rmse"] == [0, 0, 0]  # of the rest
    same = figures(actual, actual, BF16)
    assert same["nonfinite"] == [0, 0, 0]


def test_scores() -> None:
    q = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    k = draw(1, 1, 6, 4)
    _, scores = AttentionCall(q=q, k=k, v=k, scale=1.0).golden()
    assert scores["entropy"] == pytest.approx([math.log(6)] * 2)
    assert scores["tied"] == [1.0, 1.0]
    assert scores["logit_min"] == scores["logit_max"] == [0, 0]
    q, k = draw(1, 2, 5, 4), draw(1, 2, 6, 4, seed=1)
    _, scores = AttentionCall(q=q, k=k, v=k, scale=0.5, right=0).golden()
    s = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~torch.ones(5, 6).tril(1).bool(), math.nan)
    assert scores["logit_max"][2] == pytest.approx(s[~s.isnan()].max().item())
    assert scores["logit_min"][2] == pytest.approx(s[~s.isnan()].min().item())
    assert scores["tied"] == [0, 0, 0]
    p = torch.softmax(s.nan_to_num(-math.inf), -1)
    assert scores["entropy"][:2] == pytest.approx([scipy.stats.entropy(p[0, h], axis=-1).mean() for h in range(2)])
