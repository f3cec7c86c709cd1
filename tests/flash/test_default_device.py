"""On the CPU, where somebody else's default device is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assay import flash_attention

from .inputs import draw, qkv

CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "mask": {"bias": draw(20, 30) < 0.7},
    "mask, its LSE": {"bias": draw(20, 30) < 0.7, "return_lse": True},
    "causal mask": {"bias": draw(20, 30) < 0.7, "causal": True},
    "bias": {"bias": draw(20, 30), "causal": True},
    "ALiBi": {"alibi_slopes": draw(4).abs(), "causal": True, "window": (10, 0)},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 5},
    "fp8": {"fp8": True},
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("how", CALLS.values(), ids=CALLS)
def test_another_default_device(how: dict[str, Any], recorded: bool) -> None:
    """Is for those who make tensors: what a call makes is where its inputs are."""
    recorded &= "fp8" not in how
    q, k, v = (x.requires_grad_(recorded) for x in qkv(20, 30))

    def results() -> list[torch.Tensor]:
        out = flash_attention(q, k, v, **how)
        parts = list(out) if isinstance(out, tuple) else [out]
        return [*parts, *(torch.autograd.grad(parts[0].square().sum(), (q, k, v)) if recorded else ())]

    expected = results()
    with torch.device("meta"):
        found = results()
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
