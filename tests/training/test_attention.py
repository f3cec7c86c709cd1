"""Attentions by name: standard in the bits of torch's operations, the others near the value in FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from assay.cases.attention.plan import Plan
from assay.cases.attention.tiled import tiled_attention
from assay.training.attention import Attention, find_attention

LOW = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def inputs(dtype: torch.dtype = torch.float32, kv_heads: int = 4, keys: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 24, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8))
    q, k, v = (torch.randn(shape, generator=source).to(dtype) for shape in shapes)
    return q, k, v


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """As torch documents scaled_dot_product_attention: matmul, a mask that is added, softmax, matmul."""
    groups = q.shape[1] // k.shape[1]
    k, v = (torch.repeat_interleave(x, groups, dim=1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    if causal:
        scores = scores + torch.full(scores.shape[2:], -torch.inf, dtype=q.dtype).triu(1)
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def with_gradients(attention: Attention, tensors: tuple[Tensor, ...], causal: bool) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attention(*leaves, causal=causal)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_standard_has_the_bits_of_torch(dtype: torch.dtype, kv_heads: int, causal: bool) -> None:
    tensors = inputs(dtype, kv_heads)
    found, expected = (with_gradients(f, tensors, causal) for f in (find_attention("standard"), eager))
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == dtype
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["standard", "sdpa", "flash", "tiled shipped", "tiled uniform"])
def test_all_are_near_the_value_in_fp64(name: str, dtype: torch.dtype, kv_heads: int, causal: bool) -> None:
    format = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    attention = find_attention(f"{name} {format} 8x16" if name.startswith("tiled") else name)
    tensors = inputs(dtype, kv_heads)
    found = with_gradients(attention, tensors, causal)
    expected = with_gradients(eager, tuple(x.double() for x in tensors), causal)
    for actual, wanted in zip(found, expected, strict=True):
        error = (actual.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 8 * LOW[dtype]
        assert actual.shape == wanted.shape


def test_keys_of_a_caption_may_be_fewer() -> None:
    q, k, v = inputs(keys=5)
    expected = eager(q, k, v, False)
    for name in ("standard", "sdpa", "flash", "tiled shipped fp32"):
        assert torch.allclose(find_attention(name)(q, k, v), expected, atol=1e-5)


def test_a_plan_with_its_block() -> None:
    tensors = inputs(torch.bfloat16)
    for name, plan, block in (
        ("tiled uniform bf16", Plan.uniform("bf16"), (64, 64)),
        ("tiled shipped,row_sum=bf16 bf16 8x16", Plan.shipped("bf16").replace(row_sum="bf16"), (8, 16)),
    ):
        expected = tiled_attention(*tensors, plan=plan, block=block)
        assert torch.equal(find_attention(name)(*tensors, causal=False), expected)
    one, other = (find_attention(f"tiled uniform bf16 {block}")(*tensors) for block in ("8x8", "24x24"))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("flahs", r"Unknown attention 'flahs'\. Did you mean flash.*There are: standard, flash, sdpa"),
        ("tiled unifrom bf16", r"Unknown plan 'unifrom'\. Did you mean uniform"),
        ("tiled uniform bf61", r"Unknown format 'bf61'\. Did you mean bf16"),
        ("tiled uniform bf16 32", "Unknown attention 'tiled uniform bf16 32'"),
        ("", "Unknown attention ''"),
    ],
)
def test_bad_names(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_attention(name)
