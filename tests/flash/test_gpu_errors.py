"""The errors of `flash_attention` on a GPU: beside other kernels, without bias, and with its knobs turned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from assay import Plan, deviation, flash_attention, golden_attention, tiled_attention
from assay.cases.attention.kernels import OURS
from assay.flash.numerics import Numerics
from tests.flash.gpu_inputs import inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("length", [1024, 4096])
def test_no_worse_than_shipped_kernels(
    length: int, dim: int, dtype: torch.dtype, causal: bool, backend: SDPBackend
) -> None:
    """RMSE of output and gradients at most 1.05 of theirs, on the same inputs."""
    q, k, v = (x.requires_grad_() for x in inputs(4, length, dim, dtype))
    dout = torch.randn_like(q)

    def run(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
        out = call(*tensors)
        return [out.detach(), *torch.autograd.grad(out, tensors, dout.to(out.dtype))]

    def peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        truth = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), *wide)
    mine, others = run(lambda q, k, v: flash_attention(q, k, v, causal=causal), q, k, v), run(peer, q, k, v)
    for name, a, b, t in zip(("output", "dq", "dk", "dv"), mine, others, truth, strict=True):
        ratio = deviation(a, t).rmse / deviation(b, t).rmse
        assert ratio <= 1.05, f"{name}: {ratio:.3f}"


@pytest.mark.parametrize("dim", [64, 128])
def test_the_error_has_no_bias(dim: int) -> None:
    """On N(0, 1) inputs the mean error is 0 within its own interval, for at least 17 of 20 draws (95% each)."""
    inside = 0
    for seed in range(20):
        q, k, v = inputs(4, 512, dim, seed=seed)
        found = deviation(flash_attention(q, k, v), golden_attention(q, k, v))
        low, high = found.bias_interval
        inside += low <= 0 <= high
    assert inside >= 17  # P(fewer | 95% each) < 2%


def test_summing_p_after_its_cast() -> None:
    """With V = 1 the output is the sum of the cast P over the row sum: exactly 1 only if that sums the same values."""
    q, k, v = inputs(4, 1024, 64)
    ones = torch.ones_like(v)
    before = flash_attention(q, k, ones).float() - 1
    after = flash_attention(q, k, ones, numerics=Numerics(sum_after_cast=True)).float() - 1
    assert (after == 0).all()
    assert before.abs().max() <= 2**-8  # a rounding of the output in bf16 away


@pytest.mark.parametrize("kernel", OURS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_knobs_do_what_the_plan_says(kernel: Any, dtype: torch.dtype, dim: int) -> None:
    """The perturbed kernel against the emulation that rounds the same steps: as close as two roundings now and then."""
    q, k, v = inputs(2, 1024, dim, dtype)
    format = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    if format not in kernel.formats:
        pytest.skip(f"is shipped {format}")
    mine, emulated = kernel.call(q, k, v, False), kernel.emulate(q, k, v, False, kernel.plan(format))
    truth = golden_attention(q, k, v)
    assert (mine == emulated).double().mean() >= 0.9
    ratio = deviation(mine, truth).rmse / deviation(emulated, truth).rmse
    assert 0.97 <= ratio <= 1.03


@pytest.mark.parametrize("probabilities", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_format_of_p(probabilities: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 1024, 64, dtype)
    format = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    numerics = Numerics(probabilities=probabilities, block=(64, 64))
    plan = Plan.shipped(format).replace(probabilities=probabilities)
    mine = flash_attention(q, k, v, numerics=numerics)
    emulated = tiled_attention(q, k, v, plan=plan, block=(64, 64), exp2=True)
    truth = golden_attention(q, k, v)
    ratio = deviation(mine, truth).rmse / deviation(emulated, truth).rmse
    assert 0.97 <= ratio <= 1.03


@pytest.mark.parametrize("length", [64, 1024])
def test_values_of_one(length: int) -> None:
    """Their average is 1: exactly so if the row sum is taken of what P was rounded to, else but for those roundings."""
    q, k, _ = inputs(8, length, 64, torch.float16)
    for after in (True, False):
        out = flash_attention(q, k, torch.ones_like(q), numerics=Numerics(probabilities="bf16", sum_after_cast=after))
        rmse = (out.float() - 1).square().mean().sqrt()
        assert rmse == 0 if after else 0 < rmse < 2**-9
