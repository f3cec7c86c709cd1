"""The drop-in for torch's SDPA: its signature, its results, its refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from assay import flash_attention, scaled_dot_product_attention
from tests.flash.inputs import draw, qkv


def test_the_drop_in_has_torchs_signature() -> None:
    expected = (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor"
    )
    assert expected in " ".join((F.scaled_dot_product_attention.__doc__ or "").split())
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    assert f"({shown}) -> Tensor" == expected


@settings(max_examples=60)
@given(data=st.data())
def test_the_drop_in_does_what_torch_does(data: st.DataObject) -> None:
    """Any leading dimensions, masks that broadcast, grouped heads; outputs and gradients, the mask's too."""
    leading = data.draw(st.sampled_from([(), (2,), (2, 4), (3, 2, 4), (1, 4)]))
    queries, keys, dim = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from([8, 16, 24])))
    grouped = len(leading) > 1 and data.draw(st.booleans())
    kv = (*leading[:-1], 2) if grouped else leading
    kind = data.draw(st.sampled_from(["none", "causal", "bool", "float"]))
    how: dict[str, Any] = {"enable_gqa": grouped, "scale": data.draw(st.sampled_from([None, 0.3]))}
    q, k, v = draw(*leading, queries, dim), draw(*kv, keys, dim, seed=1), draw(*kv, keys, dim, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if kind == "causal":
        how["is_causal"] = True
    elif kind != "none":
        whole = data.draw(st.integers(0, len(leading)))
        mask = draw(*leading[whole:], queries, keys, seed=3)
        if kind == "bool":
            how["attn_mask"] = mask > -0.5
        else:
            how["attn_mask"] = mask.requires_grad_()
            leaves.append(mask)
    dout, results = draw(*leading, queries, dim, seed=4), []
    for call in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = call(q, k, v, **how)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for mine, theirs, bound in zip(*results, rounding(q, k, v, dout, **how), strict=False):
        assert mine.shape == theirs.shape
        assert ((mine - theirs).abs() <= bound.sum_to_size(mine.shape)).all()


def rounding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    scale: float | None,
    attn_mask: Any = None,
    **how: bool,
) -> list[torch.Tensor]:
    """How far two may be apart that round in FP32: outputs, gradients of q, k, v and mask.

    A sum of n products is off by at most n·eps of the sum of their sizes, however much of it cancels (the gradient of
    a score that is its row's only one is 0). A score that is off by x makes its probability off by x of itself.
    """
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = attn_mask.detach().double() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    one = torch.eye(k.shape[-2], dtype=q.dtype).expand(*k.shape[:-1], -1)
    p = F.scaled_dot_product_attention(q, k, one, attn_mask=mask, scale=scale, **how)
    group = q.shape[-3] // k.shape[-3] if how["enable_gqa"] else 1
    if group > 1:
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    q, k, v, dout = q.abs(), k.abs(), v.abs(), dout.abs()
    scores = q @ k.mT * scale + (0 if mask is None else mask.double().abs())
    ds = p * (dout @ v.mT + (dout * (p @ v)).sum(-1, keepdim=True))
    dk, dv = ds.mT @ q * scale, p.mT @ dout
    if group > 1:
        dk, dv = (x.unflatten(-3, (-1, group)).sum(-3) for x in (dk, dv))
    terms = q.shape[:-1].numel() + k.shape[-2] + q.shape[-1] * (2 + scores.max())
    sizes = [p @ v, ds @ k * scale, dk, dv, ds]
    return [2 * terms * torch.finfo(torch.float32).eps * size for size in sizes]


def test_the_drop_in_refuses_what_torch_refuses() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="exclude each other"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(20, 20, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        scaled_dot_product_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        scaled_dot_product_attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(16, 32), (32, 16), (20, 20)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_torchs_causal_bias(make: Any, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """A tensor whose own numbers mean nothing."""
    (queries, keys), below = lengths, 0 if make is causal_upper_left else lengths[1] - lengths[0]
    q, k, v = (draw(2, 4, n, 32, seed=n).to(dtype) for n in (queries, keys, keys))
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(below)
    bias = make(queries, keys)
    assert torch.equal(scaled_dot_product_attention(q, k, v, bias), scaled_dot_product_attention(q, k, v, mask))
    assert torch.equal(flash_attention(q, k, v, bias=bias), flash_attention(q, k, v, bias=mask))
    for x, y in zip(*(flash_attention(q, k, v, bias=each, return_lse=True) for each in (bias, mask)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("of_q", "of_kv"),
    [((), (4,)), ((4,), ()), ((), (3, 4)), ((4,), (3, 4)), ((3, 1), (4,)), ((2, 1, 4), (3, 1))],
    ids=str,
)
def test_leading_dimensions_broadcast_as_torchs(of_q: tuple[int, ...], of_kv: tuple[int, ...]) -> None:
    q, k, v = draw(*of_q, 6, 8), draw(*of_kv, 7, 8, seed=1), draw(*of_kv, 7, 8, seed=2)
    expected = F.scaled_dot_product_attention(q, k, v)
    found = scaled_dot_product_attention(q, k, v)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5


def test_dropout_of_everything_in_the_drop_in() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    for call in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = call(q, k, v, dropout_p=1.0)
        assert (out == 0).all()
        assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("lengths", [(3, 20), (70, 200), (200, 70)], ids=str)
def test_causal_from_the_first_key_reads_no_key_that_nobody_sees(lengths: tuple[int, int]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(*lengths))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (found - expected).abs().max() < 1e-5
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected)), strict=True):
        assert (a - b).abs().max() < 1e-4
    with torch.no_grad():
        k[:, :, lengths[0] :], v[:, :, lengths[0] :] = torch.nan, torch.nan
    if lengths[0] < lengths[1]:
        assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True), found)
