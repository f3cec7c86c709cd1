"""`Plan.eager` is what PyTorch's operators do."""

from __future__ import annotations

import pytest
import torch

from assay import Plan, baseline_attention, deviation, golden_attention
from assay.cases.attention.golden import golden_gradients
from assay.cases.attention.inputs import draw_inputs


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("inputs", ["uniform", "normal"])
def test_baseline_is_softmax_between_two_products(fmt: str, inputs: str) -> None:
    dtype = torch.bfloat16 if fmt == "bf16" else torch.float16
    q, k, v, grad = (x.to(dtype) for x in draw_inputs(inputs, (1, 2, 512, 64), 0))
    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.softmax(theirs[0] @ theirs[1].mT * 0.125, -1) @ theirs[2]
    out = baseline_attention(ours[0], ours[1], ours[2], plan=Plan.eager(fmt))
    wanted = (expected, *torch.autograd.grad(expected, theirs, grad))
    golden = (golden_attention(q, k, v), *golden_gradients(q, k, v, grad))
    for mine, his, truth in zip((out, *torch.autograd.grad(out, ours, grad)), wanted, golden, strict=True):
        assert deviation(mine, truth).rmse == pytest.approx(deviation(his, truth).rmse, rel=0.01)
        if fmt == "bf16":  # in fp16 this machine's library adds the products up in an order of its own
            assert (mine == his).double().mean() > 0.995
