"""What torch calls where our kernels are behind its SDPA: by hand, since torch does so on CUDA only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from assay.flash import provider
from tests.flash.inputs import draw


@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (8, 20), (20, 8)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_is_sdpa(queries: int, keys: int, causal: bool, scale: float | None) -> None:
    """The output and the gradients; causal from the first key on, as there."""
    q, k, v = (draw(2, 4, n, 16, seed=i).double() for i, n in enumerate((queries, keys, keys)))
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale)
    out, lse, cu_q, cu_k, max_q, max_k, state, offset, _ = provider._forward(q, k, v, 0.0, causal, scale=scale)
    assert (out - expected).abs().max() < 1e-12
    dout = draw(2, 4, queries, 16, seed=5).double()
    rest = (out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, state, offset)
    found = provider._backward(dout, q, k, v, *rest, scale=scale)
    for a, b in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        assert (a - b).abs().max() < 1e-12


def test_dropout_has_one_mask() -> None:
    """dV is Pᵀ·dO with the P that the output was made of: with V and dO of 1, both sum up all that is kept of P."""
    q, k, v = draw(1, 2, 40, 16), draw(1, 2, 40, 16, seed=1), torch.ones(1, 2, 40, 16)
    out, lse, cu_q, cu_k, max_q, max_k, state, offset, _ = provider._forward(q, k, v, 0.4, True)
    assert (out[..., 0] - 1).abs().max() > 0.1
    rest = (out, lse, cu_q, cu_k, max_q, max_k, 0.4, True, state, offset)
    dv = provider._backward(torch.ones_like(out), q, k, v, *rest)[2]
    assert torch.allclose(dv.sum(2), out.sum(2), rtol=1e-5)
    other = provider._forward(q, k, v, 0.4, True)[0]
    assert not torch.equal(other, out)


def test_no_debug_mask() -> None:
    q = draw(1, 2, 8, 16)
    with pytest.raises(ValueError, match="call without return_debug_mask"):
        provider._forward(q, q, q, 0.0, False, True)
