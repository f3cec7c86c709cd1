from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from assay import Plan, deviation, golden_attention, round_to, tiled_attention
from assay.cases.attention.fused import as_torch_operations
from assay.cases.attention.golden import golden_gradients
from assay.cases.attention.validate import validate
from tests.cases.inputs import qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (30, 10)},
    "alibi": {"causal": True, "alibi_slopes": True},
    "bias": {"bias": "float"},
    "bool": {"bias": "bool"},
}


def run(device: str, plan: Plan, masks: str, fused: bool = True, **how: Any) -> tuple[torch.Tensor, ...]:
    """Output and gradients on `device`, by the fused kernels or by torch operations."""
    shape = (150, 203)
    inputs = qkv(*shape, heads=4, kv_heads=2, dim=48, value_dim=40)
    leaves = [round_to(x, plan.inputs).to(device).requires_grad_() for x in inputs]
    generator = torch.Generator().manual_seed(5)
    how |= MASKS[masks]
    if "alibi_slopes" in how:
        how["alibi_slopes"] = torch.rand(4, generator=generator).to(device)
    if "bias" in how:
        bias = torch.randn(4, *shape, generator=generator)
        how["bias"] = (bias if how["bias"] == "float" else bias > 0).to(device)
    grad = round_to(torch.randn(1, 4, shape[0], 40, generator=generator), plan.inputs).to(device)
    with nullcontext() if fused else as_torch_operations():
        out = tiled_attention(*leaves, plan=plan, **how)
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    return out.detach().cpu(), *(g.cpu() for g in grads)


@pytest.mark.parametrize(
    ("fmt", "masks", "order"),
    [
        *(("bf16", masks, "fa2") for masks in MASKS),
        *(("bf16", masks, "fa1") for masks in ("full", "causal", "window")),
        *((fmt, "causal", "fa1") for fmt in ("fp16", "fp8_e4m3", "e5m6", "tf32", "fp32")),
        ("bf16", "causal", "split_kv"),
    ],
)
@pytest.mark.parametrize("saturate", [False, True])
def test_cuda_agrees_with_cpu(fmt: str, masks: str, order: str, saturate: bool) -> None:
    """The same roundings on both: what differs is the order of FP32 sums and the last bit of exp."""
    if fmt == "fp8_e4m3" and not saturate:
        pytest.skip("row sums beyond 448 are NaN in fp8_e4m3")
    plan = Plan.uniform(fmt).replace(saturate=saturate)
    how: dict[str, Any] = {"order": order, "block": (32, 50)}
    cpu = run("cpu", plan, masks, **how)
    budget = plan.output.epsilon / 2 if plan.output.epsilon > 1e-6 else 2e-6
    for fused in (True, False):
        for ours, reference in zip(run("cuda", plan, masks, fused, **how), cpu, strict=True):
            assert deviation(ours, reference).relative <= budget


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_shipped_plan_has_the_same_error_on_both(fmt: str, masks: str) -> None:
    plan = Plan.shipped(fmt)
    for cpu, cuda in zip(run("cpu", plan, masks), run("cuda", plan, masks), strict=True):
        assert deviation(cuda, cpu).relative <= plan.output.epsilon / 4


def test_paper_block_on_cuda() -> None:
    q, k, v = (round_to(x, "bf16").cuda() for x in qkv(1024, 1024, heads=2, dim=64))
    golden = golden_attention(q, k, v)
    for order in ("fa1", "fa2"):
        how: dict[str, Any] = {"plan": Plan.uniform("bf16"), "order": order, "block": (50, 50)}
        cuda = tiled_attention(q, k, v, **how)
        cpu = tiled_attention(q.cpu(), k.cpu(), v.cpu(), **how)
        here, there = deviation(cuda, golden).rmse, deviation(cpu, golden.cpu()).rmse
        assert here == pytest.approx(there, rel=0.02)


def test_null_is_exactly_zero_on_cuda() -> None:
    first, second = (run("cuda", Plan.uniform("bf16"), "causal") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("fmt", ["bf16", "e5m6"])
def test_gradient_of_any_layout(fmt: str) -> None:
    """`out.sum().backward()` hands over one number expanded to the whole output."""
    leaves = [round_to(x, fmt).cuda().requires_grad_() for x in qkv(512, 512, heads=2, dim=128)]
    out = tiled_attention(*leaves, plan=Plan.uniform(fmt), block=(64, 64))
    expanded = torch.ones((), device="cuda", dtype=out.dtype).expand_as(out)
    expected = torch.autograd.grad(out, leaves, expanded.contiguous(), retain_graph=True)
    for ours, theirs in zip(torch.autograd.grad(out, leaves, expanded), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_golden_on_cuda_is_golden_on_cpu() -> None:
    q, k, v = qkv(100, 130, heads=4, kv_heads=2)
    grad = torch.randn(1, 4, 100, 32, generator=torch.Generator().manual_seed(1))
    here = golden_gradients(q, k, v, grad, causal=True)
    there = golden_gradients(*(x.cuda() for x in (q, k, v, grad)), causal=True)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_emulations_match_the_kernels_of_this_gpu(fmt: str) -> None:
    rows = list(validate(device="cuda", formats=(fmt,), shape=(1, 8, 1024, 64)))
    assert {row.kernel for row in rows} >= {"SDPA flash (FA2)", "SDPA cuDNN", "SDPA efficient", "SDPA math"}
    assert [row.as_dict() for row in rows if not row.matches] == []
