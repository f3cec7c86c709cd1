"""What flash-attn ships beside attention: rotary embeddings, padding and unpadding."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from assay.flash.compat import (
    apply_rotary_emb,
    flash_attn_varlen_qkvpacked_func,
    index_first_axis,
    pad_input,
    unpad_input,
)

from .compat_cases import check, cumulative, dense, first_of, normal
from .rotary_cases import by_complex_numbers, tables


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 4, torch.tensor([7, 2])], ids=["none", "one", "each"])
def test_apply_rotary_emb(offsets: int | torch.Tensor, interleaved: bool) -> None:
    cos, sin, _ = tables(3, torch.float32)
    starts = torch.as_tensor(offsets).expand(2)
    x = normal(2, 6, 4, 8)
    truth = by_complex_numbers(x.transpose(1, 2), starts[:, None] + torch.arange(6), 3, interleaved)
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    torch.testing.assert_close(out.double(), truth.transpose(1, 2), rtol=0, atol=1e-6)
    x = normal(9, 4, 8)
    places = torch.cat((starts[0] + torch.arange(2), starts[1] + torch.arange(7)))
    truth = by_complex_numbers(x.transpose(0, 1)[None], places[None], 3, interleaved)
    out = apply_rotary_emb(x, cos, sin, interleaved, False, offsets, cumulative(2, 7), 7)
    torch.testing.assert_close(out.double(), truth[0].transpose(0, 1), rtol=0, atol=1e-6)


def test_apply_rotary_emb_in_place() -> None:
    cos, sin, _ = tables(4, torch.float32)
    x = normal(2, 6, 4, 8)
    expected = apply_rotary_emb(x, cos, sin)
    assert apply_rotary_emb(x, cos, sin, inplace=True) is x
    assert torch.equal(x, expected)
    leaf = normal(2, 6, 4, 8).requires_grad_()
    for inplace in (False, True):
        (grad,) = torch.autograd.grad(apply_rotary_emb(leaf * 2, cos, sin, inplace=inplace).square().sum(), leaf)
        torch.testing.assert_close(grad, 8 * leaf)  # a rotation keeps the length


def test_apply_rotary_emb_leaves_a_padded_tail() -> None:
    cos, sin, _ = tables(4, torch.float32)
    x, cu = normal(9, 4, 8), cumulative(2, 5)
    out = apply_rotary_emb(x, cos, sin, cu_seqlens=cu)
    assert torch.equal(out[:7], apply_rotary_emb(x[:7], cos, sin, cu_seqlens=cu))
    assert torch.equal(out[7:], x[7:])
    assert apply_rotary_emb(x, cos, sin, cu_seqlens=cu, inplace=True) is x
    assert torch.equal(x, out)


def test_padding_there_and_back() -> None:
    x = normal(4, 5, 2, 3).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()])
    assert torch.equal(cu_seqlens, cumulative(2, 0, 5, 2))
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert longest == 5
    assert used.tolist() == [2, 0, 5, 2]
    back = pad_input(tokens, indices, 4, 5)
    assert torch.equal(back, x * mask[..., None, None])
    assert torch.equal(pad_input(tokens, indices.int(), 4, 5), back)
    (grad,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(grad, mask[..., None, None].expand_as(x).float())


def test_unused_tokens_are_kept_and_not_counted() -> None:
    x, mask, unused = normal(2, 4, 3), torch.eye(2, 4), torch.tensor([[0, 1, 0, 0], [0, 0, 1, 1]])
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask.bool(), unused)
    assert indices.tolist() == [0, 1, 5, 6, 7]
    assert torch.equal(tokens, index_first_axis(x.flatten(0, 1), indices))
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 2, 5], 3, [1, 1])


def test_attention_of_a_padded_batch() -> None:
    """As models do it: without padding, packed, and back; a sequence of nothing but padding stays 0."""
    qkv, mask = normal(3, 6, 3, 4, 8), torch.arange(6) < torch.tensor([[4], [0], [6]])
    tokens, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)
    out = pad_input(flash_attn_varlen_qkvpacked_func(tokens, cu_seqlens, longest, causal=True), indices, 3, 6)
    for b, length in ((0, 4), (2, 6)):
        whole = dense(*qkv[b : b + 1, :length].unbind(2), causal=True)
        check([out[b : b + 1, :length]], partial(first_of, whole))
    assert not out[1].any()
