"""Random attention problems: whatever the shape, masks, order and tricks, the FP64 plan is the golden function."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay import Plan, baseline_attention, deviation, golden_attention, round_to, tiled_attention
from assay.cases.attention.golden import golden_gradients

sides = st.integers(1, 40)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and the output's gradient in FP64, and masks."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, keys, dim, value_dim = draw(sides), draw(sides), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    heads = kv_heads * group
    shapes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim), (heads, queries, value_dim))
    tensors = [torch.randn(batch, *shape, dtype=torch.float64, generator=generator) for shape in shapes]
    masks: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        side = st.none() | st.integers(0, 20)
        masks["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        masks["alibi_slopes"] = torch.rand(heads, generator=generator)
    kind = draw(st.sampled_from(["none", "float", "bool"]))
    if kind != "none":
        bias = torch.randn(batch, 1, queries, keys, generator=generator)
        masks["bias"] = bias if kind == "float" else bias > 0.3
    return tensors, masks


tricks = st.fixed_dictionaries(
    {
        "order": st.sampled_from(["fa2", "split_kv"]),
        "block": st.tuples(st.integers(1, 50), st.integers(1, 50)),
        "splits": st.integers(1, 6),
        "reverse_keys": st.booleans(),
        "exp2": st.booleans(),
        "lazy_threshold": st.none() | st.floats(0, 8),
        "sum_after_cast": st.booleans(),
        "tie_shift": st.none() | st.floats(1.1, 3),
        "probability_shift": st.integers(-8, 8),
        "scale_inside": st.booleans(),
    }
) | st.fixed_dictionaries(
    {"order": st.just("fa1"), "block": st.tuples(st.integers(1, 50), st.integers(1, 50)), "reverse_keys": st.booleans()}
)


def call(attention: Any, leaves: list[torch.Tensor], **options: Any) -> torch.Tensor:
    out: torch.Tensor = attention(*leaves, **options)
    return out


@settings(max_examples=80)
@given(problems(), tricks)
def test_fp64_plan_is_golden(problem: tuple[list[torch.Tensor], dict[str, Any]], how: dict[str, Any]) -> None:
    (q, k, v, grad), masks = problem
    out = golden_attention(q, k, v, **masks)
    truths = (out, *golden_gradients(q, k, v, grad, **masks))
    for attention, options in ((tiled_attention, how), (baseline_attention, {})):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        ours = call(attention, leaves, plan=Plan.fp64(), **masks, **options)
        results = (ours, *torch.autograd.grad(ours, leaves, grad))
        for mine, truth in zip(results, truths, strict=True):
            torch.testing.assert_close(mine.detach(), truth, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(problems(), tricks, st.sampled_from(["bf16", "fp16", "tf32", "fp8_e4m3", "fp4_e2m1", "e3m4"]))
def test_rounded_plans_stay_on_the_grid_and_finite(
    problem: tuple[list[torch.Tensor], dict[str, Any]], how: dict[str, Any], fmt: str
) -> None:
    (q, k, v, grad), masks = problem
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    plan = Plan.uniform(fmt).replace(saturate=True)
    out = call(tiled_attention, leaves, plan=plan, **masks, **how)
    results = (out.detach(), *torch.autograd.grad(out, leaves, grad.float()))
    for result in results:
        assert torch.isfinite(result).all()
        assert torch.equal(result, round_to(result, fmt))
    again = call(tiled_attention, leaves, plan=plan, **masks, **how)
    assert deviation(again.detach(), out.detach()).max == 0  # the null
