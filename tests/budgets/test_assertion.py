"""assert_within_budget on torch's own kernels, on bad ones, and on misuse."""

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

from assay.budgets.assertion import BudgetReport, assert_within_budget
from assay.budgets.figures import measure
from assay.budgets.runs import Three, run_three
from assay.budgets.verdict import CONFIDENCE, FEWEST, Judged
from assay.cases.attention.inputs import DISTRIBUTIONS, draw_inputs
from assay.formats.dtypes import format_of
from assay.metrics.deviation import deviation

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


def test_torchs_attention_is_within_budget_on_every_distribution() -> None:
    report = assert_within_budget(F.scaled_dot_product_attention, plain_attention, qkv, seeds=3)
    assert [j.distribution for j in report.judged] == list(DISTRIBUTIONS)
    assert report.name == "scaled_dot_product_attention"
    # It keeps FP32 inside where the baseline rounds to bf16: it is better, and the report says by how much.
    assert all(0 < check.ratio < 1.1 for j in report.judged for check in j.checks if check.figure == "RMSE")


def test_gradients_of_torchs_attention() -> None:
    report = assert_within_budget(
        F.scaled_dot_product_attention, plain_attention, qkv, gradients=True, distributions=("normal", "large_logits")
    )
    names = ["output", "gradient of q", "gradient of k", "gradient of v"]
    assert [(j.name, j.budget) for j in report.judged] == [(n, 2.0 if n == "output" else 3.0) for n in names] * 2


@pytest.mark.parametrize(("fn", "baseline"), [(rms_norm, plain_rms_norm), (layer_norm, plain_layer_norm)])
def test_torchs_norms(fn: Callable[..., Tensor], baseline: Callable[..., Tensor]) -> None:
    distributions = ("normal", "outliers")
    report = assert_within_budget(fn, baseline, rows, gradients=True, seeds=3, distributions=distributions)
    lines = str(report).splitlines()
    assert lines[0].startswith(f"{fn.__name__}: errors over the baseline's, on cpu")
    assert len(lines) == 2 + 2 * 3
    assert "gradient of weight  outliers, 3 seeds" in lines[-1]


def test_bf16_accumulation_fails_with_the_figures() -> None:
    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        return normal(32, 512, seed=seed), normal(512, 32, seed=100 + seed)

    message = message_of(lambda: assert_within_budget(bf16_accumulation, torch.matmul, inputs))
    assert "bf16_accumulation is over its error budget in 1 of 1 comparisons" in message
    assert "output, bf16 (32, 32), inputs 5 seeds, on cpu" in message
    figures = {line.split()[0]: line.split()[1:] for line in message.splitlines() if line.startswith("  ")}
    assert verdicts(message)[:2] == ["OVER", "OVER"]
    worst = max(
        (deviation(bf16_accumulation(*x), torch.matmul(*(y.double() for y in x))).max, seed)
        for seed, x in enumerate(map(inputs, range(5)))
    )
    assert float(figures["fn"][0]) == pytest.approx(worst[0], rel=1e-2)
    assert f"Worst element: seed {worst[1]}, index (" in message
    assert float(figures["ratio"][0]) > 3
    assert "Accumulate in FP32" in message


def test_the_worst_element_is_the_worst_element() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x * 3
        y[2, 5] = 7.0
        return y

    x = normal(8, 16)
    message = message_of(lambda: assert_within_budget(broken, lambda x: x * 3, (x,), name="the edge"))
    golden = 3 * x[2, 5].item()
    expected = f"index (2, 5): fn 7, baseline {(3 * x)[2, 5].item():.7g}, golden {golden:.9g}"
    assert expected in message
    assert message.startswith("the edge is over")


def test_few_wrong_elements_get_other_advice_than_many() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x * 3
        y.view(-1)[y.argmax()] *= 1 + 2.0**-20
        return y

    message = message_of(lambda: assert_within_budget(broken, lambda x: x * 3, (normal(64, 512, dtype=FP32),)))
    assert verdicts(message) == ["OVER", "ok", "ok", "–", "–"]
    assert "most elements are good, few are far off" in message
    assert "One set of inputs, so the bias is not judged" in message


def test_softmax_without_the_maximum_gives_nan() -> None:
    x = 8 * normal(32, 64, dtype=FP32)
    message = message_of(lambda: assert_within_budget(naive_softmax, lambda x: x.softmax(-1), (x.half(),)))
    wrong = int(naive_softmax(x.half()).isfinite().logical_not().sum())
    assert f"NaN or infinite in wrong places: {wrong} of {x.numel()} numbers" in message
    assert "subtract the maximum first" in message
    assert "fn nan" in message


@pytest.mark.parametrize("inputs", [lambda seed: (normal(32, 256, seed=seed),), (normal(32, 256),)])
def test_where_nothing_is_a_number_nothing_is_ok(inputs: Callable[[int], tuple[Tensor]] | tuple[Tensor]) -> None:
    message = message_of(lambda: assert_within_budget(lambda x: x * torch.nan, lambda x: x * 2, inputs))
    assert set(verdicts(message)) <= {"OVER", "–"}
    assert "subtract the maximum first" in message


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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinities_in_wrong_places_fail(bad: float) -> None:
    def broken(x: Tensor) -> Tensor:
        y = x * 2
        y[3] = bad
        return y

    assert "in wrong places: 1 of 40" in message_of(
        lambda: assert_within_budget(broken, lambda x: x * 2, (normal(40),), budget=1e9)
    )


def test_infinity_is_right_where_the_format_cannot_hold_the_value() -> None:
    x = normal(64, dtype=FP16)
    x[7] = 60000.0
    assert_within_budget(lambda x: x + x, lambda x: x * 2, (x,))
    message = message_of(lambda: assert_within_budget(lambda x: (x + x).clamp(max=65504.0), lambda x: x * 2, (x,)))
    assert "index (7,): fn 65504, baseline inf, golden inf" in message


def test_a_baseline_that_breaks_is_no_measure() -> None:
    x = 8 * normal(32, 64, dtype=FP16)
    with pytest.raises(ValueError, match="baseline must be finite where the golden value is"):
        assert_within_budget(lambda x: x.softmax(-1), naive_softmax, (x,))
    with pytest.raises(ValueError, match="golden value must be finite somewhere"):
        assert_within_budget(lambda x: x / 0, lambda x: x / 0, (torch.ones(64),))


def test_casts_in_the_baseline_keep_fp64() -> None:
    """The oracle is torch's kernel, which has no casts, in FP64."""
    x, weight = rows(0, "normal")
    found = run_three(rms_norm, plain_rms_norm, None, (x, weight), 0)
    oracle = run_three(rms_norm, plain_rms_norm, rms_norm, (x, weight), 0)
    assert list(found) == ["output", "gradient of x", "gradient of weight"]
    for name, three in found.items():
        torch.testing.assert_close(three.golden, oracle[name].golden, rtol=1e-12, atol=1e-12)
    in_fp32 = plain_rms_norm(x.double(), weight.double())  # without our care
    assert (in_fp32 - found["output"].golden).abs().max() > 1e-8


def test_the_gradient_that_flows_in_is_not_the_input() -> None:
    x = normal(64, seed=7, dtype=FP32)
    flowing = run_three(lambda x: x * 1, lambda x: x * 1, None, (x,), 7)["gradient of x"]
    assert torch.equal(flowing.golden, flowing.fn.double())
    assert abs(np.corrcoef(x.numpy(), flowing.fn.numpy())[0, 1]) < 0.5
    assert flowing.fn.std() == pytest.approx(1, rel=0.3)


def test_bits_cannot_be_taken_for_fp64() -> None:
    with pytest.raises(ValueError, match=r"must stay in FP64.*view.*Pass golden="):
        assert_within_budget(truncated_rms_norm, truncated_rms_norm, rows, distributions=("normal",))
    assert torch.ones(2).double().to(FP32).dtype == FP32  # nothing stays patched
    report = assert_within_budget(
        truncated_rms_norm, truncated_rms_norm, rows, 2.1, golden=rms_norm, distributions=("normal",)
    )
    assert only(report).fn.outward < 0


def test_a_baseline_that_fails_in_fp64_says_what_to_do() -> None:
    weight = normal(16, 32)
    with pytest.raises(ValueError, match=r"baseline failed.*Hand every tensor that it uses over in `inputs`"):
        assert_within_budget(lambda x: x @ weight, lambda x: x @ weight, (normal(8, 16),))


def test_another_golden() -> None:
    calls: list[torch.dtype] = []

    def golden(x: Tensor) -> Tensor:
        calls.append(x.dtype)
        return torch.from_numpy(np.exp(x.numpy()))

    assert_within_budget(torch.exp, torch.exp, (normal(64),), golden=golden)
    assert calls == [torch.float64]
    with pytest.raises(ValueError, match=r"golden value must be FP64.*torch.float32"):
        assert_within_budget(torch.exp, torch.exp, (normal(64),), golden=lambda x: x.float().exp())


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0] * y, grads[0] * x * 0.5


class _NoGradient(_HalfGradient):
    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def test_a_wrong_gradient_fails_and_is_named() -> None:
    pair = normal(64), normal(64, seed=1)
    assert_within_budget(_HalfGradient.apply, lambda x, y: x * y, pair)
    message = message_of(lambda: assert_within_budget(_HalfGradient.apply, lambda x, y: x * y, pair, gradients=True))
    assert "in 1 of 3 comparisons" in message
    assert "gradient of y, bf16 (64,)" in message
    assert "budget 3" in message


def test_a_missing_gradient_is_named() -> None:
    pair = normal(64), normal(64, seed=1)
    with pytest.raises(ValueError, match="but has none for y"):
        assert_within_budget(_NoGradient.apply, lambda x, y: x * y, pair, gradients=True)
    with pytest.raises(ValueError, match="output 0 of fn has none"):
        assert_within_budget(lambda x, y: (x * y).detach(), lambda x, y: x * y, pair, gradients=True)
    with pytest.raises(ValueError, match="output 0 of baseline has none"):
        assert_within_budget(lambda x, y: x * y, lambda x, y: (x * y).detach(), pair, gradients=True)


def test_several_outputs_and_integer_inputs() -> None:
    def pick(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return x[at], x.float().logsumexp(-1)

    at = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(0))
    report = assert_within_budget(pick, lambda *inputs: list(pick(*inputs)), (normal(64, 8), at), gradients=True)
    assert [(j.name, j.format) for j in report.judged] == [
        ("output 0", "bf16"),
        ("output 1", "fp32"),
        ("gradient of input 0", "bf16"),
    ]


def test_nobody_sees_what_another_does_to_the_inputs() -> None:
    x = normal(64)
    before = x.clone()
    assert_within_budget(lambda x: x.mul_(2), lambda x: x * 2, (x,))
    assert torch.equal(x, before)


def test_a_function_without_a_distribution_gets_seeds_only() -> None:
    seen: list[int] = []

    def inputs(seed: int) -> tuple[Tensor]:
        seen.append(seed)
        return (normal(64, seed=seed),)

    report = assert_within_budget(torch.exp, torch.exp, inputs, seeds=3)
    assert seen == [0, 1, 2]
    assert [m.worst.seed for m in only(report).seeds] == seen


def test_float8_outputs() -> None:
    def to_fp8(x: Tensor) -> Tensor:
        return x.exp().to(torch.float8_e5m2)

    judged = only(assert_within_budget(to_fp8, to_fp8, (normal(64),), golden=torch.exp))
    assert judged.format == format_of(torch.float8_e5m2).name
    assert judged.fn.ulp_max <= 0.75  # twice rounded


X = (torch.ones(64),)
TWICE = {"fn": lambda x: x * 2, "baseline": lambda x: x * 2, "inputs": X}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"budget": 0.0}, "budget must be a factor above 0"),
        ({"budget": True}, "budget must be a factor above 0"),
        ({"gradient_budget": math.inf}, "gradient_budget must be a factor above 0"),
        ({"inputs": torch.ones(64)}, r"inputs must be a tuple of tensors, got Tensor\. One tensor is given as \(x,\)"),
        ({"inputs": lambda seed: torch.ones(64)}, r"inputs\(0\) must be .* One tensor is given as \(x,\)"),
        ({"inputs": (torch.ones(64), 3)}, r"got \(Tensor, int\).*Bind everything else"),
        ({"inputs": (torch.ones(64, dtype=torch.int64),)}, "must have a floating tensor"),
        ({"inputs": lambda seed: None}, r"inputs\(0\) must be a tuple of tensors, got NoneType"),
        ({"inputs": lambda seed: X, "seeds": 0}, "seeds must be a whole number"),
        ({"inputs": lambda seed: X, "distributions": ("normal",)}, "it takes only the seed"),
        ({"distributions": ("normal",)}, "got tensors"),
        ({"inputs": lambda seed, distribution: X, "distributions": "normal"}, "must be several names"),
        ({"fn": lambda x: x[:32]}, r"same shapes and dtypes.*fn gives torch.float32 \(32,\)"),
        ({"fn": lambda x: x.half()}, "fn gives torch.float16"),
        ({"fn": lambda x: (x, x)}, "the same number of outputs"),
        ({"fn": lambda x: x.argsort()}, "output 0 is torch.int64"),
        ({"fn": lambda x: None}, "What fn returns must be a tensor of floats.*None"),
        ({"inputs": (torch.ones(64).double(),)}, "can judge narrower formats only"),
    ],
)
def test_misuse_says_the_rule(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        assert_within_budget(**{**TWICE, **change})  # type: ignore[arg-type]
