"""NaN and infinities on the CPU, by torch's kernel and by our own: they stay in their rows, and are not lost there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assay import flash_attention, scaled_dot_product_attention

from .inputs import draw


@pytest.mark.parametrize("dim", [8, 16], ids=["dims", "dropout"])
def test_nan_in_hidden_keys_reaches_no_row(dim: int) -> None:
    q, k, v = draw(1, 2, 6, 16), draw(1, 2, 6, 16, seed=1), draw(1, 2, 6, dim, seed=2)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 4] = False
    dropout_p = 0.0 if dim == 8 else 0.5
    clean = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for bad in (torch.nan, torch.inf, -torch.inf):
        k[:, :, 4], v[:, :, 4] = bad, bad
        for leaves in ((q, k, v), [x.clone().requires_grad_() for x in (q, k, v)]):
            found = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask, dropout_p)
            assert found.isfinite().all()
            if not dropout_p:
                assert (found - clean).abs().max() < 1e-6
        assert all(x.isfinite().all() for x in torch.autograd.grad(found.sum(), leaves))


@pytest.mark.parametrize("keys", [1, 7, 15, 16, 40])
@pytest.mark.parametrize("dim", [16, 8])
@pytest.mark.parametrize(
    "how",
    [{}, {"causal": True}, {"bias": 0.0}, {"return_lse": True}, {"cu_seqlens_q": [0, 4, 4]}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_row_of_nan_is_not_lost(keys: int, dim: int, how: dict[str, Any], dtype: torch.dtype) -> None:
    """Over few keys torch's kernel takes it for a row that sees nothing, and gives 0."""
    q, k, v = draw(1, 2, 4, 16), draw(1, 2, keys, 16, seed=1), draw(1, 2, keys, dim, seed=2)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if "bias" in how:
        how = {"bias": torch.zeros(4, keys, dtype=dtype)}
    if "cu_seqlens_q" in how:
        cu_k = torch.tensor([0, keys, keys], dtype=torch.int32)
        how = {"cu_seqlens_q": torch.tensor([0, 4, 4], dtype=torch.int32), "cu_seqlens_k": cu_k}
    if "causal" in how:
        q = q[:, :, :keys]
    clean = flash_attention(q, k, v, **how)
    q[:, :, -1] = torch.nan
    found = flash_attention(q, k, v, **how)
    if "return_lse" in how:
        assert found[1][:, :, -1].isnan().all()
        found, clean = found[0], clean[0]
    assert found[:, :, -1].isnan().all()
    assert (found - clean)[:, :, :-1].abs().sum() <= 2 * torch.finfo(dtype).eps * clean.numel()


@pytest.mark.parametrize("keys", [7, 16, 40])
@pytest.mark.parametrize(
    "how",
    [
        {}, {"causal": True}, {"bias": 0.0}, {"bias": torch.inf}, {"return_lse": True}, {"window": (38, 0)},
        {"grouped": True}, {"record": True}, {"few": True, "causal": True}, {"dim": 24}, {"dim": 12},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, torch.inf), (torch.bfloat16, torch.inf), (torch.float16, torch.inf),
        (torch.float32, 1e30), (torch.bfloat16, 1e30),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("compiled", ["", "eager", "aot_eager"])
def test_a_row_of_infinity_is_not_lost(
    keys: int, how: dict[str, Any], dtype: torch.dtype, size: float, compiled: str
) -> None:
    """inf − inf is NaN; in bf16 torch's kernel gives 0 for it. No other row changes, nor the order in memory."""
    how = dict(how)
    drawn = (draw(2, keys, 2, dim, seed=seed) for seed, dim in enumerate((16, 16, how.pop("dim", 16))))
    q, k, v = (x.to(dtype).transpose(1, 2) for x in drawn)
    k[:, :, 2, 5] = 1.0  # so that its score is +inf, and no other one NaN
    if how.pop("grouped", False):
        k, v = k[:, :1], v[:, :1]
    few = how.pop("few", False)
    if few:
        q = q[:, :, 4:]
    by_blocks = few or "window" in how  # which are ours where a mask may hide a NaN
    if how.pop("record", False):
        v = v.detach().requires_grad_()
    hidden = "bias" in how and how["bias"] == torch.inf
    if "bias" in how:
        how = {"bias": torch.zeros(keys, keys, dtype=dtype)}
    attend = torch.compile(flash_attention, backend=compiled) if compiled else flash_attention
    clean = attend(q, k, v, **how)
    if hidden:
        how["bias"][-1, 3] = torch.inf
    else:
        q[0, 1, -1, 5] = size
        k[0, :, 2, 5] = size
    found = attend(q, k, v, **how)
    eager = flash_attention(q, k, v, **how)
    if "return_lse" in how:
        found, clean, eager = found[0], clean[0], eager[0]
    assert found.stride() == clean.stride() == eager.stride()
    rows = found[:, :, -1] if hidden else found[0, 1, -1]
    assert rows.isnan().all()
    if not hidden and size == torch.inf:
        k[0, :, 2, 5] = 1.0  # else the key's own rows are NaN, too
        found = attend(q, k, v, **how)
        found = found[0] if "return_lse" in how else found
        assert found[0, 1, -1].isnan().all()
        assert keys < 16 or by_blocks or torch.equal(found[1], clean[1])
        found = found.detach().clone()
        found[0, 1, -1] = clean[0, 1, -1]
        assert (found - clean).abs().sum() <= 2 * torch.finfo(dtype).eps * clean.numel()


def test_keys_of_nan_are_not_lost() -> None:
    q, k, v = draw(1, 2, 4, 16), draw(1, 2, 5, 16, seed=1), draw(1, 2, 5, 16, seed=2)
    k[:] = torch.nan
    assert flash_attention(q, k, v).isnan().all()
    assert scaled_dot_product_attention(q, k, v).isnan().all()
