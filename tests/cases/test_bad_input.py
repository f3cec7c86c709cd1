from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from assay import Plan, baseline_attention, golden_attention, tiled_attention
from assay.cases.attention.blocks import block_from_sram, check_block, square, swapped
from assay.cases.attention.golden import golden_gradients
from assay.cases.attention.quantization import Quantization
from tests.cases.inputs import qkv

PLAN = Plan.uniform("bf16")
ATTENTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "golden": golden_attention,
    "baseline": lambda *a, **k: baseline_attention(*a, plan=PLAN, **k),
    "tiled": lambda *a, **k: tiled_attention(*a, plan=PLAN, **k),
}


@pytest.fixture(params=ATTENTIONS)
def attention(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    return ATTENTIONS[request.param]


Q, K, V = qkv(8, 8, heads=4, kv_heads=2, dim=8)


@pytest.mark.parametrize(
    ("inputs", "kwargs", "says"),
    [
        (
            (Q[0], K, V),
            {},
            r"q must have the shape \(batch, heads, length, head dimension\), got \(4, 8, 8\)",
        ),
        ((Q.int(), K, V), {}, "q must be float64, float32, bfloat16 or float16, got torch.int32"),
        ((Q, K, V.bfloat16()), {}, "one dtype, got torch.float32, torch.float32, torch.bfloat16"),
        ((Q, K.to("meta"), V), {}, "one device, got cpu, meta, cpu"),
        ((Q[:, :3], K, V), {}, "multiple of the key/value heads .*, got 3 and 2"),
        ((Q, K[..., :4], V), {}, "same head dimension, got 8 and 4"),
        ((Q, K[:, :, :5], V), {}, "k and v must agree"),
        ((Q, K.repeat(2, 1, 1, 1), V.repeat(2, 1, 1, 1)), {}, "same batch size, got 1 and 2"),
        ((Q[:, :, :0], K, V), {}, r"q must not be empty, got the shape \(1, 4, 0, 8\)"),
        ((Q, K[:, :, :0], V[:, :, :0]), {}, "k must not be empty"),
        ((Q.tolist(), K, V), {}, "q must be a torch tensor, got list"),
        ((Q, K, V), {"scale": "1"}, "scale must be a positive finite number, got '1'"),
        ((Q, K, V), {"scale": float("nan")}, "scale must be a positive finite number, got nan"),
        ((Q, K, V), {"causal": "no"}, "causal must be True or False, got 'no'"),
        ((Q, K, V), {"window": (True, 0)}, "window's sides must be None or whole numbers"),
        ((Q, K, V), {"bias": [1.0]}, "bias must be a torch tensor, got list"),
        ((Q, K, V), {"alibi_slopes": [1.0] * 4}, "alibi_slopes must be a torch tensor, got list"),
        ((Q, K, V), {"alibi_slopes": torch.ones(4, requires_grad=True)}, "alibi_slopes have no gradient here"),
        ((Q, K, V), {"scale": -1.0}, "scale must be a positive finite number, got -1.0"),
        ((Q, K, V), {"window": (-1, 0)}, r"window's sides must be None or whole numbers .* got \(-1, 0\)"),
        ((Q, K, V), {"window": 5}, r"window must be \(left, right\)"),
        ((Q, K, V), {"bias": torch.zeros(9, 8)}, r"bias must broadcast to .*\(1, 4, 8, 8\), got \(9, 8\)"),
        ((Q, K, V), {"bias": torch.zeros(8, 8, dtype=torch.int64)}, "bias must be float .* or bool"),
        ((Q, K, V), {"bias": torch.zeros(8, 8, requires_grad=True)}, "bias has no gradient here"),
        ((Q, K, V), {"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be float of shape .*got .*\(3,\)"),
    ],
)
def test_every_attention_says_what_is_wrong(
    attention: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    kwargs: dict[str, Any],
    says: str,
) -> None:
    with pytest.raises(ValueError, match=says):
        attention(*inputs, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"block": (0, 64)}, r"block sizes must be whole numbers of at least 1, got \(0, 64\)"),
        ({"block": (16, -1)}, "at least 1"),
        ({"block": 64}, r"block must be \(rows, columns\)"),
        ({"order": "fa4"}, "order must be one of fa1, fa2, split_kv; got 'fa4'"),
        ({"order": "split_kv", "splits": 0}, "splits must be a whole number of at least 1"),
        ({"order": "fa1", "lazy_threshold": 1.0}, "lazy_threshold needs order='fa2'"),
        ({"lazy_threshold": -1.0}, "lazy_threshold must be at least 0"),
        ({"lazy_threshold": float("inf")}, "at least 0 and finite, got inf"),
        ({"lazy_threshold": "1"}, "lazy_threshold must be at least 0"),
        ({"tie_shift": 1.0}, "tie_shift .* must be greater than 1"),
        ({"tie_shift": "7"}, "tie_shift .* must be greater than 1"),
        ({"splits": 2.5}, "splits must be a whole number"),
        ({"probability_shift": 0.5}, "probability_shift must be a whole number"),
        ({"exp2": "no"}, "exp2 must be True or False, got 'no'"),
        ({"quantization": "tensor"}, "quantization must be a Quantization, got 'tensor'"),
        ({"block": (True, True)}, "block sizes must be whole numbers"),
        ({"block": (64.0, 64)}, "block sizes must be whole numbers"),
    ],
)
def test_tiling_says_what_is_wrong(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiled_attention(Q, K, V, plan=PLAN, **kwargs)


@pytest.mark.parametrize("plan", [None, "bf16"])
def test_a_plan_is_a_plan(plan: Any) -> None:
    for attention in (baseline_attention, tiled_attention):
        with pytest.raises(ValueError, match=r"plan must be a Plan, got .*Plan.uniform"):
            attention(Q, K, V, plan=plan)


@pytest.mark.parametrize("grad", [None, torch.zeros(3, 9, 80, 8), torch.zeros(1, 4, 8, 8, dtype=torch.int32)])
def test_golden_gradients_check_the_gradient(grad: Any) -> None:
    with pytest.raises(ValueError, match="grad must"):
        golden_gradients(Q, K, V, grad)


def test_quantization_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="at most 8 bits, got inputs=bf16"):
        tiled_attention(Q, K, V, plan=Plan.shipped("bf16"), quantization=Quantization())
    with pytest.raises(ValueError, match="scales must be one of"):
        Quantization(scales="row")  # type: ignore[arg-type]
    q, k, v = qkv(8, 8, dim=24)
    with pytest.raises(ValueError, match="power of two, got 24"):
        tiled_attention(q, k, v, plan=Plan.fa3_fp8(), quantization=Quantization(incoherent=True))


def test_blocks_from_the_papers_rule() -> None:
    assert block_from_sram(12_800, 64) == (50, 50)
    assert block_from_sram(100_000, 64) == (64, 391)  # rows are capped by d
    assert swapped((64, 391)) == (391, 64)
    assert square((64, 391)) == (158, 158)
    assert square((50, 50)) == (50, 50)
    with pytest.raises(ValueError, match="at least 1 element"):
        block_from_sram(0, 64)
    with pytest.raises(ValueError, match="at least 1"):
        check_block((1, 0))


# What must come out of unusual but valid inputs.


def test_rows_that_see_nothing_are_zero_with_zero_gradients(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = qkv(12, 5, heads=2, dim=8)  # more queries than keys: the first 7 rows see none
    golden = golden_attention(q, k, v, causal=True)
    out = attention(q, k, v, causal=True)
    assert torch.isfinite(out).all()
    assert (out[:, :, :7] == 0).all()
    assert (golden[:, :, 7:].abs() > 0).any()
    grads: tuple[torch.Tensor, ...]
    if attention is golden_attention:
        grads = golden_gradients(q, k, v, torch.ones(1, 2, 12, 8), causal=True)
    else:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(attention(*leaves, causal=True).sum(), leaves)
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][:, :, :7] == 0).all()


@pytest.mark.parametrize("order", ["fa1", "fa2", "split_kv"])
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp32", "fp8_e4m3"])
def test_bool_masks_that_hide_whole_rows(order: Any, fmt: str) -> None:
    q, k, v = qkv(10, 40, dim=8)
    mask = torch.rand(10, 40, generator=torch.Generator().manual_seed(0)) > 0.7
    mask[3] = False
    plan = Plan.uniform(fmt).replace(saturate=True)
    out = tiled_attention(q, k, v, plan=plan, order=order, bias=mask, block=(4, 8))
    assert torch.isfinite(out).all()
    assert (out[0, 0, 3] == 0).all()
    assert (out[0, 0, 4] != 0).any()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ["baseline", "fa1", "fa2", "split_kv"])
def test_nan_and_inf_travel_as_in_fp64(where: str, value: float, causal: bool, order: Any) -> None:
    inputs: dict[str, Any] = dict(zip("qkv", qkv(40, 40, dim=8), strict=True))
    inputs[where][0, 0, 20, 3] = value
    golden = golden_attention(**inputs, causal=causal)
    plan = Plan.shipped("bf16")
    if order == "baseline":
        out = baseline_attention(**inputs, plan=plan, causal=causal)
    else:
        out = tiled_attention(**inputs, plan=plan, order=order, block=(8, 8), causal=causal)
    assert not torch.isfinite(golden).all()
    assert torch.equal(torch.isnan(out), torch.isnan(golden))
    assert torch.equal(torch.isinf(out), torch.isinf(golden))


def test_scores_that_overflow_fp16_become_nan_only_in_their_rows() -> None:
    q, k, v = qkv(16, 16, dim=8)
    q[0, 0, 3] = 300.0
    k[0, 0, :] = 300.0
    out = tiled_attention(q, k, v, plan=Plan.uniform("fp16"), scale=1.0)
    assert torch.isnan(out[0, 0, 3]).all()  # 300·300·8 is beyond 65504, in FP16 scores
    assert torch.isfinite(tiled_attention(q, k, v, plan=Plan.shipped("fp16"), scale=1.0)).all()


@pytest.mark.parametrize("where", ["q", "k", "v", "grad"])
@pytest.mark.parametrize("order", ["fa1", "fa2"])
def test_nan_travels_in_backward_as_in_fp64(where: str, order: Any) -> None:
    tensors = dict(zip(("q", "k", "v"), qkv(40, 40, dim=8), strict=True))
    tensors["grad"] = torch.ones(1, 1, 40, 8)
    tensors[where][0, 0, 20, 3] = float("nan")
    golden = golden_gradients(*tensors.values(), causal=True)
    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
    out = tiled_attention(*leaves, plan=Plan.shipped("bf16"), order=order, block=(8, 8), causal=True)
    ours = torch.autograd.grad(out, leaves, tensors["grad"])
    for mine, truth in zip(ours, golden, strict=True):
        assert torch.equal(torch.isnan(mine), torch.isnan(truth))
