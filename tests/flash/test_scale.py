"""Scales of any sign and size, on the CPU: the kernel behind SDPA multiplies its causal −inf by them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from assay import flash_attention, scaled_dot_product_attention
from assay.flash.compat import flash_attn_func, flash_attn_with_kvcache
from assay.flash.decode import attention_with_cache
from tests.flash.inputs import qkv
from tests.flash.reference import reference_attention

Call = Callable[[Tensor, Tensor, Tensor, float], Tensor]
WHOLE = torch.tensor([0, 20], dtype=torch.int32)


def heads_second(call: Callable[..., Tensor]) -> Call:
    """In flash-attn's layout."""
    return lambda q, k, v, scale: call(
        *(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=True
    ).transpose(1, 2)


CALLS: dict[str, Call] = {
    "plain": lambda q, k, v, scale: flash_attention(q, k, v, causal=True, scale=scale),
    "LSE": lambda q, k, v, scale: flash_attention(q, k, v, causal=True, scale=scale, return_lse=True)[0],
    "window": lambda q, k, v, scale: flash_attention(q, k, v, window=(30, 0), scale=scale),
    "mask": lambda q, k, v, scale: flash_attention(
        q, k, v, causal=True, scale=scale, bias=torch.ones(20, 20, dtype=torch.bool)
    ),
    "batch": lambda q, k, v, scale: flash_attention(q, k, v, causal=True, scale=scale, batch_invariant=True),
    "packed": lambda q, k, v, scale: torch.cat(
        [flash_attention(*x, causal=True, scale=scale, cu_seqlens_q=WHOLE)
         for x in zip(q.split(1), k.split(1), v.split(1), strict=True)]
    ),
    "SDPA": lambda q, k, v, scale: scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    ),
    "flash-attn": heads_second(flash_attn_func),
    "cache": lambda q, k, v, scale: attention_with_cache(q, k, v, causal=True, scale=scale),
    "flash-attn's cache": heads_second(flash_attn_with_kvcache),
}  # fmt: skip
SCALES = [-0.5, 0.0, -0.0, 1e-40, -1e-40, 1e-320, 3.0]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", CALLS)
def test_causal(name: str, scale: float) -> None:
    q, k, v = (x.double() for x in qkv())
    expected, _ = reference_attention(q, k, v, causal=True, scale=scale)
    assert (CALLS[name](q, k, v, scale) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["plain", "LSE", "packed", "SDPA"])
def test_gradients(name: str, scale: float) -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv())
    expected, _ = reference_attention(q, k, v, causal=True, scale=scale)
    wanted, found = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (expected, CALLS[name](q, k, v, scale)))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", SCALES[:5])
def test_other_dtypes(dtype: torch.dtype, scale: float) -> None:
    """At most twice the error of plain attention in the dtype, and a rounding of the output."""
    q, k, v = (x.to(dtype) for x in qkv())
    truth, _ = reference_attention(*(x.double() for x in (q, k, v)), causal=True, scale=scale)
    plain, _ = reference_attention(q, k, v, causal=True, scale=scale)
    rounding = torch.finfo(dtype).eps * truth.abs().max()
    for name in ("plain", "SDPA"):
        found = (CALLS[name](q, k, v, scale) - truth).abs().max()
        assert found <= 2 * (plain - truth).abs().max() + rounding


def test_numpys_numbers() -> None:
    q, k, v = qkv()
    for scale in (np.float32(0.25), np.float64(0.25), np.int64(2)):
        assert torch.equal(flash_attention(q, k, v, scale=scale), flash_attention(q, k, v, scale=float(scale)))
    with pytest.raises(ValueError, match="scale must be a number, finite"):
        flash_attention(q, k, v, scale=np.float32("inf"))
    with pytest.raises(ValueError, match="scale must be a number, finite"):
        flash_attention(q, k, v, scale=np.bool_(True))
