"""What assert_within_budget measures: ULPs, signed bias, and the floor that rounding once has."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from assay.budgets.assertion import assert_within_budget
from assay.budgets.figures import measure
from assay.budgets.runs import Three
from assay.budgets.verdict import CONFIDENCE, FEWEST
from assay.cases.attention.inputs import DISTRIBUTIONS, draw_inputs
from assay.metrics.deviation import deviation
from tests.budgets.kernels import (
    BF16,
    FP16,
    FP32,
    bf16_accumulation,
    layer_norm,
    message_of,
    normal,
    only,
    plain_attention,
    plain_layer_norm,
    plain_rms_norm,
    rms_norm,
    rows,
    truncated_rms_norm,
    verdicts,
)


def flushed_softmax(x: Tensor) -> Tensor:
    """All that is small beside the largest becomes zero: little in RMSE, everything in the small ones."""
    y = x.softmax(-1)
    return torch.where(y < {FP16: 3e-5, BF16: 1e-5, FP32: 3e-8}[x.dtype], 0, y)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("several", [True, False])
def test_small_results_that_are_lost_are_seen_in_ulps(dtype: torch.dtype, several: bool) -> None:
    def inputs(seed: int) -> tuple[Tensor]:
        return ((4 * normal(32, 256, seed=seed, dtype=FP32)).to(dtype),)

    def plain(x: Tensor) -> Tensor:
        return x.softmax(-1)

    given = inputs if several else inputs(0)
    message = message_of(lambda: assert_within_budget(flushed_softmax, plain, given))
    assert verdicts(message)[:3] == ["ok", "ok", "OVER"]
    assert "large results are good, small ones are wrong" in message
    assert all(check.ratio <= 1 for check in only(assert_within_budget(plain, plain, given)).checks)


def exp2_softmax(x: Tensor) -> Tensor:
    """As fast kernels do it."""
    h = x.float() * math.log2(math.e)
    e = torch.exp2(h - h.amax(-1, keepdim=True))
    return (e * (1 / e.sum(-1, keepdim=True))).to(x.dtype)


def plain_softmax(x: Tensor) -> Tensor:
    h = x.float()
    e = (h - h.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def plain_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


HONEST: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "softmax": (lambda x: x.softmax(-1), plain_softmax, 1),
    "softmax by exp2": (exp2_softmax, plain_softmax, 1),
    "rms_norm": (rms_norm, plain_rms_norm, 2),
    "layer_norm": (layer_norm, plain_layer_norm, 2),
    "gelu": (F.gelu, plain_gelu, 1),
    "attention": (F.scaled_dot_product_attention, plain_attention, 3),
}


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("name", HONEST)
def test_honest_kernels_are_within_budget_in_ulps(name: str, dtype: torch.dtype) -> None:
    fn, baseline, count = HONEST[name]

    def inputs(seed: int, distribution: str) -> tuple[Tensor, ...]:
        q, k, v = (x.to(dtype) for x in draw_inputs(distribution, (1, 1, 32, 128), seed)[:3])
        return (q, k, v) if count == 3 else (q[0, 0], k[0, 0, 0])[:count]

    report = assert_within_budget(fn, baseline, inputs, 1e9, seeds=3)
    ratios = {j.distribution: check.ratio for j in report.judged for check in j.checks if check.figure == "bits"}
    assert ratios.keys() == DISTRIBUTIONS.keys()
    assert max(ratios.values()) < 1.7, ratios


def test_what_is_zero_but_for_rounding_counts_for_nothing_in_ulps() -> None:
    """The first query sees one key, so its gradient is 0, and what is found instead is noise that baselines lack."""

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def inputs(seed: int) -> tuple[Tensor, ...]:
        return tuple(x.float() for x in draw_inputs("normal", (1, 2, 8, 16), seed)[:3])

    report = assert_within_budget(causal, plain, inputs, gradients=True)
    (dq,) = (j for j in report.judged if j.name == "gradient of q")
    assert dq.fn.ulp_mean > 1e6 * dq.baseline.ulp_mean
    assert all(check.ratio < 2 for check in dq.checks)


def test_truncation_is_within_twice_the_error_but_its_bias_is_seen() -> None:
    """Truncation has exactly twice the error of rounding; on symmetric outputs its signed errors cancel."""
    draw = ("normal",)
    message = message_of(
        lambda: assert_within_budget(truncated_rms_norm, plain_rms_norm, rows, 2.05, distributions=draw)
    )
    assert verdicts(message) == ["ok", "ok", "ok", "ok", "OVER"]
    assert "lean to one side" in message


def test_signed_bias_is_seen() -> None:
    def shifted(x: Tensor) -> Tensor:
        return (x.double().exp() + 2.0**-26).float()

    def inputs(seed: int) -> tuple[Tensor]:
        return (normal(64, 64, seed=seed, dtype=FP32),)

    message = message_of(lambda: assert_within_budget(shifted, torch.exp, inputs))
    assert verdicts(message) == ["ok", "ok", "ok", "OVER", "OVER"]
    assert "lean to one side" in message


def test_bias_intervals_are_students() -> None:
    def inputs(seed: int) -> tuple[Tensor]:
        return (normal(64, seed=seed),)

    judged = only(assert_within_budget(torch.tanh, torch.tanh, inputs, seeds=4))
    biases = [deviation(torch.tanh(x), torch.tanh(x.double())).bias for (x,) in map(inputs, range(4))]
    mean, half = judged.interval("fn", "bias")
    low, high = stats.t.interval(CONFIDENCE, 3, loc=np.mean(biases), scale=stats.sem(biases))
    assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-9)


@settings(max_examples=25)
@given(
    st.sampled_from([BF16, FP16, FP32]),
    st.integers(FEWEST, 200),
    st.integers(0, 2**31 - 1),
    st.sampled_from([torch.exp, torch.sin, torch.tanh]),
)
def test_the_baseline_is_within_its_own_budget(
    dtype: torch.dtype, size: int, seed: int, function: Callable[[Tensor], Tensor]
) -> None:
    """The null: the same thing twice has a ratio of at most 1, at any size and format."""
    judged = only(assert_within_budget(function, function, (normal(size, seed=seed, dtype=dtype),), budget=1.0))
    assert judged.fn == judged.baseline
    assert all(check.ratio <= 1.0 for check in judged.checks)


@settings(max_examples=25)
@given(st.integers(-20, 20), st.integers(0, 10**6))
def test_powers_of_two_change_no_ratio(power: int, seed: int) -> None:
    a, b = normal(16, 64, seed=seed), normal(64, 16, seed=seed + 1)
    checks = [
        only(assert_within_budget(bf16_accumulation, torch.matmul, (scale * a, b), budget=1e3)).checks
        for scale in (1.0, 2.0**power)
    ]
    assert checks[0] == checks[1]


@settings(max_examples=50)
@given(
    st.lists(st.floats(-1e30, 1e30, allow_subnormal=True), min_size=1, max_size=50),
    st.sampled_from([BF16, FP32]),
)
def test_rounding_once_is_within_the_floor(values: list[float], dtype: torch.dtype) -> None:
    golden = torch.tensor(values, dtype=torch.float64)
    once = golden.to(dtype)
    found = measure(Three(once, once, golden), 0)
    assert found.fn.max <= found.floor.max
    assert found.fn.ulp_max <= 0.5
    assert found.fn.rmse <= math.sqrt(3) * found.floor.rmse * (1 + 1e-12)
    assert found.ratio_max <= 1
    assert found.fn.bits <= math.log2(1.5)


def test_the_floor_is_half_an_ulp() -> None:
    golden = normal(1000, dtype=FP32).double()
    spacing = np.spacing(np.abs(golden.numpy()).astype(np.float32)).astype(np.float64)
    floor = measure(Three(golden.float(), golden.float(), golden), 0).floor
    assert floor.max == spacing.max() / 2
    assert floor.rmse == pytest.approx(np.sqrt(np.mean(spacing**2) / 12), rel=1e-12)
    # On values that fall anywhere between two numbers it is what rounding them costs.
    anywhere = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = measure(Three(anywhere.to(BF16), anywhere.to(BF16), anywhere), 0)
    assert found.fn.rmse == pytest.approx(found.floor.rmse, rel=0.01)
    assert found.fn.bits == pytest.approx(found.floor.bits, rel=0.01)
    assert found.floor.bits == pytest.approx(np.log2(1 + np.linspace(0, 0.5, 100_001)).mean(), rel=1e-4)


def test_an_exact_baseline_allows_rounding_but_no_more() -> None:
    def off(every: int) -> Callable[[Tensor], Tensor]:
        def copy(x: Tensor) -> Tensor:
            y = x.clone()
            y[::every] = x[::every].nextafter(2 * x[::every])
            y[:: 2 * every] = x[:: 2 * every].nextafter(torch.zeros(()))
            return y

        return copy

    def inputs(seed: int) -> tuple[Tensor]:
        return (normal(640, seed=seed, dtype=FP32),)

    judged = only(assert_within_budget(off(10), torch.clone, inputs))
    assert judged.baseline.max == 0
    assert judged.fn.max > 0
    message = message_of(lambda: assert_within_budget(off(1), torch.clone, inputs))
    assert verdicts(message)[:2] == ["ok", "OVER"]
    assert "the baseline is exact here" in message


def test_what_differs_from_seed_to_seed_is_no_bias() -> None:
    """All errors of a seed lean to one side, but seeds lean to different sides: the interval holds 0."""

    def leaning(x: Tensor, side: Tensor) -> Tensor:
        return (x + 0.4 * torch.finfo(BF16).eps * side).to(BF16)

    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(1024, generator=torch.Generator().manual_seed(seed)) + 1
        return x.clamp(1.01, 1.99), torch.full((1,), (-1.0) ** seed)

    def baseline(x: Tensor, side: Tensor) -> Tensor:
        return x.to(BF16)

    judged = only(assert_within_budget(leaning, baseline, inputs))
    assert min(abs(m.fn.bias) for m in judged.seeds) > 10 * judged.interval("floor", "bias")[1]
    assert [check.ratio for check in judged.checks][3:] == [0.0, 0.0]
    message = message_of(lambda: assert_within_budget(leaning, baseline, lambda seed: inputs(2 * seed)))
    assert verdicts(message)[3:] == ["OVER", "OVER"]


def test_enough_numbers_means_enough() -> None:
    assert stats.f.sf(4, FEWEST, FEWEST) < 1e-4
    with pytest.raises(ValueError, match=r"at least 32 numbers.*output has 5 over 5 seed"):
        assert_within_budget(torch.sum, torch.sum, lambda seed: (normal(64, seed=seed),))
    assert_within_budget(torch.sum, torch.sum, lambda seed: (normal(64, seed=seed),), seeds=32)
