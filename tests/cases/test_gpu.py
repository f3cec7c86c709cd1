from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from assay import Plan, deviation, golden_attention, round_to, tiled_attention
from assay.cases.attention.golden import golden_gradients
from assay.cases.attention.validate import validate
from tests.cases.inputs import qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MASKS: dict[str, dict[str, object]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (30, 10)},
    "alibi": {"causal": True, "alibi_slopes": True},
    "bias": {"bias": "float"},
    "bool": {"bias": "bool"},
}


def run(
    device: str, plan: Plan, masks: dict[str, object], fused: bool = True, shape: tuple[int, int] = (150, 203), **how: object
) -> tuple[torch.Tensor, ...]:
    """Output and gradients on `device`; the fused kernels or the torch path."""
    tensors = [round_to(x, plan.inputs).to(device) for x in qkv(*shape, heads=4, kv_heads=2, dim=48, value_dim=40)]
    generator = torch.Generator().manual_seed(5)
    masks = dict(masks)
    if "alibi_slopes" in masks:
        masks["alibi_slopes"] = torch.rand(4, generator=generator).to(device)
    if "bias" in masks:
        bias = torch.randn(4, *shape, generator=generator)
        masks["bias"] = (bias if masks["bias"] == "float" else bias > 0).to(device)
    grad = round_to(torch.randn(1, 4, shape[0], 40, generator=generator), plan.inputs).to(device)
    leaves = [x.requires_grad_() for x in tensors]
    forward, backward = (f"assay.cases.attention.tiled_{way}.fused_kernels" for way in ("forward", "backward"))
    if fused:
        out = tiled_attention(*leaves, plan=plan, **masks, **how)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    else:
        with patch(forward, return_value=None), patch(backward, return_value=None):
            out = tiled_attention(*leaves, plan=plan, **masks, **how)  # type: ignore[arg-type]
            grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    return out.detach().cpu(), *(g.cpu() for g in grads)


@pytest.mark.parametrize("order", ["fa1", "fa2", "split_kv"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_e4m3", "tf32", "fp32"])
def test_cuda_agrees_with_cpu(fmt: str, masks: str, order: str) -> None:
    """The same roundings on both: what differs is the order of FP32 sums and the last bit of exp."""
    plan = Plan.uniform(fmt).replace(saturate=True)
    how: dict[str, object] = {"order": order, "block": (32, 50)}
    eps = plan.output.epsilon
    for fused in (True, False):
        for cpu, cuda in zip(run("cpu", plan, MASKS[masks], **how), run("cuda", plan, MASKS[masks], fused, **how), strict=True):
            difference = deviation(cuda, cpu)
            assert difference.relative <= (eps / 2 if eps > 1e-6 else 2e-6)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_shipped_plan_has_the_same_error_on_both(fmt: str, masks: str) -> None:
    plan = Plan.shipped(fmt)
    for cpu, cuda in zip(run("cpu", plan, MASKS[masks]), run("cuda", plan, MASKS[masks]), strict=True):
        assert deviation(cuda, cpu).relative <= plan.output.epsilon / 4


def test_paper_block_on_cuda() -> None:
    q, k, v = (round_to(x, "bf16").cuda() for x in qkv(1024, 1024, heads=2, dim=64))
    golden = golden_attention(q, k, v)
    for order in ("fa1", "fa2"):
        plan = Plan.uniform("bf16")
        cuda = tiled_attention(q, k, v, plan=plan, order=order, block=(50, 50))  # type: ignore[arg-type]
        cpu = tiled_attention(q.cpu(), k.cpu(), v.cpu(), plan=plan, order=order, block=(50, 50))  # type: ignore[arg-type]
        here, there = deviation(cuda, golden).rmse, deviation(cpu, golden.cpu()).rmse
        assert here == pytest.approx(there, rel=0.02)


def test_null_is_exactly_zero_on_cuda() -> None:
    first, second = (run("cuda", Plan.uniform("bf16"), {"causal": True}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
