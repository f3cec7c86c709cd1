"""assert_within_budget on torch's own kernels, on bad ones, and on misuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.budgets.assertion import assert_within_budget
from assay.budgets.runs import run_three
from assay.cases.attention.inputs import DISTRIBUTIONS
from assay.formats.dtypes import format_of
from assay.metrics.deviation import deviation
from tests.budgets.kernels import (
    FP16,
    FP32,
    bf16_accumulation,
    layer_norm,
    message_of,
    naive_softmax,
    normal,
    only,
    plain_attention,
    plain_layer_norm,
    plain_rms_norm,
    qkv,
    rms_norm,
    rows,
    truncated_rms_norm,
    verdicts,
)


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
