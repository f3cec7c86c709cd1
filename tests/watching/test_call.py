"""Plain attention of a caught call, against `golden_attention` in FP64 and torch; its figures against `deviation`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import assay
from assay.cases.attention.golden import golden_attention, golden_gradients
from assay.formats.catalog import BF16
from assay.watching import plain as plainly
from assay.watching import sums
from assay.watching.call import AttentionCall
from assay.watching.comparing import Columns, Comparing
from assay.watching.plain import plain
from assay.watching.scores import Scores


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


@pytest.mark.parametrize(("at_once", "rows"), [(1, 128), (1 << 20, 128), (1 << 20, 4)])
@pytest.mark.parametrize("name", MASKS)
def test_in_fp64_it_is_golden(name: str, at_once: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plainly._SCORES_AT_ONCE, "cpu", at_once)
    monkeypatch.setitem(plainly._EXACT_ROWS, "cpu", rows)
    tensors, (mine, theirs) = qkv(), MASKS[name]
    call = AttentionCall(**tensors, scale=0.3, **mine)
    expected = golden_attention(**tensors, scale=0.3, **theirs)
    torch.testing.assert_close(plain(call)[0], expected, rtol=1e-12, atol=1e-13)
    grad = draw(*expected.shape, seed=5)
    out, *gradients = plain(call, grad)
    assert torch.equal(out, plain(call)[0])
    for ours, golden in zip(gradients, golden_gradients(**tensors, grad=grad, scale=0.3, **theirs), strict=True):
        torch.testing.assert_close(ours, golden, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lengths", [(40, 40), (9, 50), (50, 9)])
@pytest.mark.parametrize("window", [{"right": 0}, {"left": 5, "right": 0}, {"left": 2, "right": 3}, {"right": -30}])
def test_keys_that_nobody_sees_are_left_out_in_fp64(
    window: dict[str, Any], lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys = lengths
    call = AttentionCall(**qkv(queries=queries, keys=keys), scale=0.3, bias=draw(1, 4, queries, keys), **window)
    grad = draw(2, 4, queries, 8, seed=5)
    monkeypatch.setitem(plainly._EXACT_ROWS, "cpu", 1000)
    expected, whole = plain(call, grad), Scores(torch.float64)
    plain(call, None, whole)
    monkeypatch.setitem(plainly._EXACT_ROWS, "cpu", 7)
    cut = Scores(torch.float64)
    for a, b in zip(plain(call, grad, cut), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(cut.gathered(), whole.gathered(), rtol=1e-12, atol=1e-12)


def test_sinks_softcap_and_slopes_against_our_kernels() -> None:
    tensors = {name: x.float() for name, x in qkv().items()}
    how: dict[str, Any] = {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    ours = assay.flash_attention(**tensors, causal=True, **how)
    call = AttentionCall(**tensors, scale=8**-0.5, right=0, **how)
    torch.testing.assert_close(plain(call)[0], ours, rtol=1e-4, atol=1e-5)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    ours = assay.flash_attention(**tensors, causal=True, alibi_slopes=slopes)
    call = AttentionCall(**tensors, scale=8**-0.5, right=0, slopes=slopes)
    torch.testing.assert_close(plain(call)[0], ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.25, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_in_bf16_it_is_what_torch_writes_down(causal: bool, scale: float) -> None:
    q, k, v = (draw(2, 4, 9, 8, seed=seed, dtype=torch.bfloat16).requires_grad_() for seed in range(3))
    grad = draw(2, 4, 9, 8, seed=4, dtype=torch.bfloat16)
    s = (q @ k.transpose(-1, -2)) * scale
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    out = torch.softmax(s.masked_fill(hidden, -torch.inf) if causal else s, -1) @ v
    found = plain(AttentionCall(q=q, k=k, v=v, scale=scale, right=0 if causal else None), grad)
    for ours, theirs in zip(found, (out, *torch.autograd.grad(out, (q, k, v), grad)), strict=True):
        assert torch.equal(ours, theirs)


def test_a_row_that_sees_no_key_gives_0_and_no_gradient() -> None:
    call = AttentionCall(**qkv(queries=13, keys=9), scale=1.0, right=0)
    out, dq, _, _ = plain(call, draw(2, 4, 13, 8))
    assert (out[:, :, :4] == 0).all()
    assert (dq[:, :, :4] == 0).all()
    assert dq.isfinite().all()


def columns_of(actual: Tensor, golden: Tensor, other: Tensor | None = None) -> Columns:
    other = golden if other is None else other
    return Comparing({"output": actual}, [other], [golden], None, BF16).columns()["output"]


@pytest.mark.parametrize("piece", [100, 1 << 16])
@pytest.mark.parametrize("strided", [False, True])
def test_figures_are_those_of_deviation_head_by_head(
    strided: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sums.PIECE, "cpu", piece)
    golden = draw(2, 3, 50, 8)
    actual, other = ((golden + 1e-3 * draw(2, 3, 50, 8, seed=seed)).to(torch.bfloat16) for seed in (9, 10))
    if strided:
        actual = actual.transpose(1, 2).contiguous().transpose(1, 2)
    found = columns_of(actual, golden, other)
    for head in range(4):
        x, z, y = (t if head == 3 else t[:, head] for t in (actual, other, golden))
        expected = assay.deviation(x.contiguous(), y.contiguous(), format="bf16")
        for name in ("max", "mean", "std", "rmse", "relative", "bias", "ulp_max", "ulp_mean", "cosine", "sqnr"):
            assert found[f"error_{name}"][head] == pytest.approx(getattr(expected, name), rel=1e-9), name
        interval = (found["error_bias_low"][head], found["error_bias_high"][head])
        assert interval == pytest.approx(expected.bias_interval, rel=1e-6)
        distance = scipy.stats.wasserstein_distance(x.double().flatten(), y.flatten())
        assert found["error_w1"][head] == pytest.approx(distance, rel=1e-9)
        assert found["error_q99"][head] == pytest.approx(torch.quantile((x - y).abs().flatten(), 0.99).item())
        baseline, between = assay.deviation(z, y), assay.deviation(x, z)
        for name in ("max", "rmse", "bias"):
            assert found[f"baseline_{name}"][head] == pytest.approx(getattr(baseline, name), rel=1e-9)
        for name in ("max", "rmse"):
            assert found[f"difference_{name}"][head] == pytest.approx(getattr(between, name), rel=1e-9)
            ratio = getattr(expected, name) / getattr(baseline, name)
            assert found[f"ratio_{name}"][head] == pytest.approx(ratio, rel=1e-9)


def test_an_exact_baseline_counts_as_one_rounding() -> None:
    golden = draw(1, 2, 50, 8)
    rounded = golden.to(torch.bfloat16)
    floor = assay.deviation(rounded, golden)
    actual = (golden + 1e-3 * draw(1, 2, 50, 8, seed=9)).to(torch.bfloat16)
    found = columns_of(actual, golden)
    assert found["baseline_rmse"] == [0, 0, 0]
    assert found["ratio_rmse"][2] == pytest.approx(assay.deviation(actual, golden).rmse / floor.rmse, rel=1e-9)


@pytest.mark.parametrize(("rows", "over"), [(7, [False, False, False]), (8, [False, True, False])])
def test_a_head_of_few_rows_is_not_judged_by_itself(rows: int, over: list[bool]) -> None:
    golden = draw(1, 2, rows, 64)
    other = golden + 1e-2 * draw(1, 2, rows, 64, seed=9)
    other[:, 0] += 1.0
    actual = other.clone()
    actual[:, 1] = golden[:, 1] + 5 * (other[:, 1] - golden[:, 1])
    found = columns_of(actual, golden, other)
    assert found["ratio_rmse"][1] == pytest.approx(5)
    assert found["over"] == over


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_stopped_being_a_number(bad: float) -> None:
    golden = draw(1, 2, 5, 4)
    actual = golden.clone()
    actual[0, 1, 2, 3] = bad
    found = columns_of(actual, golden)
    assert found["error_nonfinite"] == found["actual_nonfinite"] == [0, 1, 1]
    assert found["error_max"] == found["difference_max"] == [0, math.inf, math.inf]
    assert found["error_rmse"] == [0, 0, 0]  # of the rest
    assert found["over"] == [False, True, True]
    same = columns_of(actual, actual)
    assert same["error_nonfinite"] == [0, 0, 0]
    assert same["actual_nonfinite"] == [0, 1, 1]  # golden has it too
    without = Comparing({"output": actual}, [actual], [None], None, BF16).columns()["output"]
    assert without["actual_nonfinite"] == [0, 1, 1]
    assert columns_of(golden, golden)["actual_nonfinite"] == [0, 0, 0]
    assert same["error_cosine"] == pytest.approx([1, 1, 1])


def scores_of(call: AttentionCall) -> dict[str, list[float]]:
    _, scores = call.golden(None)
    return scores.figures(scores.gathered())


def test_scores() -> None:
    q = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    k = draw(1, 1, 6, 4)
    scores = scores_of(AttentionCall(q=q, k=k, v=k, scale=1.0))
    assert scores["entropy"] == pytest.approx([math.log(6)] * 2)
    assert scores["tied"] == [1.0, 1.0]
    assert scores["logit_min"] == scores["logit_max"] == [0, 0]
    q, k = draw(1, 2, 5, 4), draw(1, 2, 6, 4, seed=1)
    scores = scores_of(AttentionCall(q=q, k=k, v=k, scale=0.5, right=0))
    s = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~torch.ones(5, 6).tril(1).bool(), math.nan)
    assert scores["logit_max"][2] == pytest.approx(s[~s.isnan()].max().item())
    assert scores["logit_min"][2] == pytest.approx(s[~s.isnan()].min().item())
    assert scores["tied"] == [0, 0, 0]
    p = torch.softmax(s.nan_to_num(-math.inf), -1)
    assert scores["entropy"][:2] == pytest.approx([scipy.stats.entropy(p[0, h], axis=-1).mean() for h in range(2)])


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.bfloat16).min])
def test_scores_of_rows_that_see_nothing(hidden: float) -> None:
    """Also where a mask is the most negative number: then such a row looks at everything alike."""
    bias = torch.zeros(1, 1, 5, 6)
    bias[:, :, 1], bias[:, :, 2, 3:] = hidden, hidden
    q, k = draw(1, 2, 5, 4), draw(1, 2, 6, 4, seed=1)
    scores = scores_of(AttentionCall(q=q, k=k, v=k, scale=0.5, bias=bias))
    s = q @ k.transpose(-1, -2) * 0.5 + bias
    seen = s[s > -1e30]
    assert (scores["logit_min"][2], scores["logit_max"][2]) == pytest.approx((seen.min().item(), seen.max().item()))
    p = torch.softmax(s, -1).nan_to_num(0.0)
    assert scores["entropy"][:2] == pytest.approx(torch.special.entr(p).sum(-1).mean(-1)[0].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_are_those_of_the_format(dtype: torch.dtype) -> None:
    q = torch.ones(1, 1, 2, 1, dtype=dtype)
    apart = torch.finfo(dtype).eps
    k = torch.tensor([1.0, 1 + apart, 0.5, 1 + apart], dtype=dtype).view(1, 1, 4, 1)
    assert scores_of(AttentionCall(q=q, k=k, v=k, scale=1.0))["tied"] == [1, 1]
    assert scores_of(AttentionCall(q=q, k=k[:, :, :3], v=k[:, :, :3], scale=1.0))["tied"] == [0, 0]
    bias = torch.tensor([apart / 4, 0.0, 0.0], dtype=torch.float64).view(1, 1, 1, 3)  # lost in the format
    same = torch.ones_like(k[:, :, :3])
    assert scores_of(AttentionCall(q=q, k=same, v=same, scale=1.0, bias=bias))["tied"] == [1, 1]


class _NoWaiting(TorchDispatchMode):
    """Refuses what would wait for a device: to ask for a number, or how many there are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **kwargs or {})


def test_nothing_waits_for_the_device_before_all_is_gathered() -> None:
    call = AttentionCall(**{name: x.to(torch.bfloat16) for name, x in qkv().items()}, scale=0.3, right=0)
    grad = draw(2, 4, 9, 8, seed=5)
    with _NoWaiting():
        others, (goldens, scores) = call.plain(grad), call.golden(grad)
        found = [sums.gathered(list(zip(others, others, goldens, strict=True)), BF16), scores.gathered()]
    with pytest.raises(AssertionError), _NoWaiting():
        found[0].sum().item()
