from __future__ import annotations

from typing import Any

import pytest
import torch

from assay import Plan, baseline_attention, deviation, round_to, tiled_attention
from assay.cases.attention import problem
from assay.cases.attention.golden import golden_gradients
from tests.cases import literal
from tests.cases.inputs import qkv
from tests.cases.test_tiled_forward import NATIVE, assert_same_up_to_sums


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = tiled_attention(*leaves, **kwargs)
    return torch.autograd.grad(out, leaves, grad.to(out.dtype))


def random_like(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("fmt", NATIVE)
@pytest.mark.parametrize(("shape", "block"), [((64, 96), (32, 32)), ((45, 61), (16, 25))])
def test_equals_the_literal_double_loop(fmt: str, shape: tuple[int, int], block: tuple[int, int]) -> None:
    q, k, v = (x.to(NATIVE[fmt]) for x in qkv(*shape, dim=32))
    grad = random_like(1, 1, shape[0], 32).to(NATIVE[fmt])
    ours = gradients(q, k, v, grad, plan=Plan.uniform(fmt), block=block)
    o, lse = literal.fa2(q[0, 0], k[0, 0], v[0, 0], block)
    expected = literal.fa2_backward(q[0, 0], k[0, 0], v[0, 0], o, lse, grad[0, 0], block)
    for mine, theirs in zip(ours, expected, strict=True):
        if fmt in ("fp32", "fp64"):
            assert_same_up_to_sums(mine[0, 0], theirs)
        else:  # one moved rounding in forward touches a row of dQ and, a little, every dK and dV
            assert deviation(mine[0, 0], theirs).relative < torch.finfo(NATIVE[fmt]).eps / 4


@pytest.mark.parametrize("order", ["fa1", "fa2", "split_kv"])
@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": (9, 4)}])
def test_fp64_plan_is_golden(order: str, masks: dict[str, Any]) -> None:
    q, k, v = (x.double() for x in qkv(45, 61, batch=2, heads=4, kv_heads=2, dim=24, value_dim=20))
    grad = random_like(2, 4, 45, 20).double()
    ours = gradients(q, k, v, grad, plan=Plan.fp64(), order=order, exp2=True, block=(16, 10), **masks)
    golden = golden_gradients(q, k, v, grad, **masks)
    for mine, truth in zip(ours, golden, strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-13)


def test_autograd_agrees_with_finite_differences() -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv(5, 6, dim=4))

    def attention(*x: torch.Tensor) -> torch.Tensor:
        return tiled_attention(*x, plan=Plan.fp64(), block=(2, 3), causal=True)

    assert torch.autograd.gradcheck(attention, (q, k, v))


def test_pieces_change_no_bit_of_rounded_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(130, 150, heads=4, kv_heads=2, dim=16)
    grad = random_like(1, 4, 130, 16)
    kwargs: dict[str, Any] = {"plan": Plan.uniform("bf16"), "block": (16, 32), "causal": True}
    whole = gradients(q, k, v, grad, **kwargs)
    monkeypatch.setattr(problem, "_ROWS_AT_ONCE", 32)
    monkeypatch.setitem(problem._TILE_ELEMENTS, "cpu", 600)
    for a, b in zip(whole, gradients(q, k, v, grad, **kwargs), strict=True):
        assert torch.equal(a, b)


def test_narrow_running_gradients_cost_accuracy() -> None:
    """What PyTorch's CPU kernel does: the running dK and dV in bf16, rounded after every block of rows."""
    q, k, v = (round_to(x, "bf16") for x in qkv(1024, 128, dim=32))
    grad = round_to(random_like(1, 1, 1024, 32), "bf16")
    golden = golden_gradients(q, k, v, grad)
    wide = gradients(q, k, v, grad, plan=Plan.shipped("bf16"), block=(64, 64))
    narrow = gradients(q, k, v, grad, plan=Plan.shipped("bf16").replace(dk="bf16", dv="bf16"), block=(64, 64))
    for i in (1, 2):
        assert deviation(narrow[i], golden[i]).rmse > 1.3 * deviation(wide[i], golden[i]).rmse
    assert torch.equal(wide[0], narrow[0])


def test_log_sum_exp_in_bf16_spoils_gradients_alone() -> None:
    q, k, v = (round_to(x, "bf16") for x in qkv(128, 128, dim=32))
    grad = round_to(random_like(1, 1, 128, 32), "bf16")
    plan = Plan.shipped("bf16")
    coarse = plan.replace(log_sum_exp="bf16")
    assert torch.equal(tiled_attention(q, k, v, plan=plan), tiled_attention(q, k, v, plan=coarse))
    golden = golden_gradients(q, k, v, grad)
    good, bad = (gradients(q, k, v, grad, plan=p) for p in (plan, coarse))
    for i in range(3):
        assert deviation(bad[i], golden[i]).rmse > 2 * deviation(good[i], golden[i]).rmse


def test_quantized_inputs_have_no_backward() -> None:
    from assay.cases.attention.quantization import Quantization

    q, k, v = qkv(16, 16, dim=16)
    q.requires_grad_()
    out = tiled_attention(q, k, v, plan=Plan.fa3_fp8(), quantization=Quantization())
    with pytest.raises(ValueError, match="forward only"):
        out.sum().backward()


def test_double_backward_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(8, 8, dim=8))
    for out in (
        tiled_attention(q, k, v, plan=Plan.uniform("fp32")),
        baseline_attention(q, k, v, plan=Plan.uniform("fp32")),
    ):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(out.sum(), q, create_graph=True)
