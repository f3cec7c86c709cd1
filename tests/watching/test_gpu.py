"""On a GPU: whoever is watched computes the same bits, outputs and gradients, whichever kernel attention is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from assay.flash.attention import flash_attention
from assay.training.determinism import deterministic
from assay.watching.watch import watch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, DIM, LENGTH = 4, 64, 300
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flash_attention(q, k, v, causal=True)
    return out


KERNELS: dict[str, tuple[Attention, tuple[torch.dtype, ...]]] = {
    "SDPA flash": (fused(SDPBackend.FLASH_ATTENTION), (torch.bfloat16, torch.float16)),
    "SDPA math": (fused(SDPBackend.MATH), (torch.bfloat16, torch.float32)),
    "ours": (ours, (torch.bfloat16, torch.float16, torch.float32)),
}
CASES = [(name, dtype) for name, (_, dtypes) in KERNELS.items() for dtype in dtypes]


class Layer(nn.Module):
    def __init__(self, attend: Attention) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        y: Tensor = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return y


def network(attend: Attention, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(attend) for _ in range(3))).to("cuda", dtype)


def results(model: nn.Module, dtype: torch.dtype, autocast: torch.dtype | None = None) -> list[Tensor]:
    """The output, and the gradients of the input and of all weights, of two steps."""
    found: list[Tensor] = []
    for seed in range(2):
        model.zero_grad()
        draw = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(2, LENGTH, HEADS * DIM, device="cuda", dtype=dtype, generator=draw).requires_grad_()
        with nullcontext() if autocast is None else torch.autocast("cuda", autocast):
            out = model(x)
        out.float().square().mean().backward()
        gradients: list[Any] = [x.grad, *(parameter.grad for parameter in model.parameters())]
        found += [out.detach(), *(each.clone() for each in gradients)]
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_outputs_and_gradients_have_the_same_bits(name: str, dtype: torch.dtype, every: int) -> None:
    model = network(KERNELS[name][0], dtype)
    with deterministic():
        alone = results(model, dtype)
        assert same(results(model, dtype), alone), "without a watch it does not repeat itself"
        with watch(model, every=every) as w:
            watched = results(model, dtype)
        assert same(watched, alone)
        assert same(results(model, dtype), alone)  # and afterwards
    assert w.calls == 6 // every
    assert not w.skipped
    assert {row["tensor"] for row in w.rows} == {"output", "dq", "dk", "dv"}
    assert not any(row["over"] for row in w.rows if row["head"] is None), w.summary()


def test_under_autocast() -> None:
    model = network(KERNELS["SDPA flash"][0], torch.float32)
    with deterministic():
        alone = results(model, torch.float32, torch.bfloat16)
        with watch(model) as w:
            watched = results(model, torch.float32, torch.bfloat16)
    assert same(watched, alone)
    assert {row["format"] for row in w.rows} == {"bf16"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_torch_s_fused_layer_in_inference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(HEADS * DIM, HEADS, batch_first=True).to("cuda", dtype).eval()
    x = torch.randn(2, LENGTH, HEADS * DIM, device="cuda", dtype=dtype)
    with torch.no_grad():
        alone = model(x)
        with watch(model) as w:
            watched = model(x)
    assert torch.equal(watched, alone)
    assert w.calls == 1
