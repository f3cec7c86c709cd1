"""flash-attn's functions: their signatures as published, their results as the formula reads."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from assay.flash import compat
from assay.flash.compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

from .compat_cases import OPTIONS, check, cumulative, dense, gradients, normal, packed

NEEDED = inspect.Parameter.empty
SCORES = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
DROPOUT_AND_SCORES = {"dropout_p": 0.0} | SCORES
TRAINING = {"alibi_slopes": None, "deterministic": False, "return_attn_probs": False}
PACKING = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), NEEDED)
PUBLISHED: dict[str, dict[str, Any]] = {
    "flash_attn_func": dict.fromkeys(("q", "k", "v"), NEEDED) | DROPOUT_AND_SCORES | TRAINING,
    "flash_attn_kvpacked_func": dict.fromkeys(("q", "kv"), NEEDED) | DROPOUT_AND_SCORES | TRAINING,
    "flash_attn_qkvpacked_func": {"qkv": NEEDED} | DROPOUT_AND_SCORES | TRAINING,
    "flash_attn_varlen_func": dict.fromkeys(("q", "k", "v"), NEEDED)
    | PACKING
    | DROPOUT_AND_SCORES
    | TRAINING
    | {"block_table": None},
    "flash_attn_varlen_kvpacked_func": dict.fromkeys(("q", "kv"), NEEDED) | PACKING | DROPOUT_AND_SCORES | TRAINING,
    "flash_attn_varlen_qkvpacked_func": dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen"), NEEDED)
    | DROPOUT_AND_SCORES
    | TRAINING,
    "flash_attn_with_kvcache": dict.fromkeys(("q", "k_cache", "v_cache"), NEEDED)
    | dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"), None)
    | {"block_table": None}
    | SCORES
    | {"rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False},
    "apply_rotary_emb": dict.fromkeys(("x", "cos", "sin"), NEEDED)
    | {"interleaved": False, "inplace": False, "seqlen_offsets": 0, "cu_seqlens": None, "max_seqlen": None},
    "index_first_axis": dict.fromkeys(("input", "indices"), NEEDED),
    "unpad_input": {"hidden_states": NEEDED, "attention_mask": NEEDED, "unused_mask": None},
    "pad_input": dict.fromkeys(("hidden_states", "indices", "batch", "seqlen"), NEEDED),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_signatures_are_those_of_the_package(name: str) -> None:
    parameters = inspect.signature(getattr(compat, name)).parameters
    assert {parameter: value.default for parameter, value in parameters.items()} == PUBLISHED[name]
    assert list(parameters) == list(PUBLISHED[name])
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_every_function_is_on_the_table() -> None:
    assert set(compat.__all__) == set(PUBLISHED)


@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name: str) -> None:
    theirs, ours = OPTIONS[name]
    q, k, v = normal(2, 11, 4, 8), normal(2, 17, 2, 8, seed=1), normal(2, 17, 2, 8, seed=2)
    out, lse, nothing = flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    assert nothing is None
    check([out, lse], dense(q, k, v, **ours))
    assert torch.equal(flash_attn_func(q, k, v, **theirs), out)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **theirs), out)
    qkv = normal(2, 11, 3, 4, 8)
    out, lse, _ = flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **theirs)
    check([out, lse], dense(*qkv.unbind(2), **ours))


def test_a_softcap_below_0_is_none() -> None:
    q, k, v = normal(2, 5, 4, 8), normal(2, 5, 2, 8, seed=1), normal(2, 5, 2, 8, seed=2)
    for softcap in (-1.0, np.float32(-1)):
        assert torch.equal(flash_attn_func(q, k, v, softcap=softcap), flash_attn_func(q, k, v))  # type: ignore[arg-type]
    assert torch.equal(flash_attn_with_kvcache(q, k, v, softcap=-1.0), flash_attn_with_kvcache(q, k, v))


@pytest.mark.parametrize("name", OPTIONS)
def test_varlen(name: str) -> None:
    theirs, ours = OPTIONS[name]
    q, k, v = normal(20, 4, 8), normal(30, 2, 8, seed=1), normal(30, 2, 8, seed=2)
    cu_q, cu_k = cumulative(13, 7), cumulative(11, 19)
    out, lse, nothing = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 13, 19, return_attn_probs=True, **theirs)
    assert nothing is None
    check([out, lse], packed(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **ours))
    together = flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), cu_q, cu_k, 13, 19, **theirs)
    assert torch.equal(together, out)
    qkv = normal(20, 3, 4, 8)
    out, lse, _ = flash_attn_varlen_qkvpacked_func(qkv, cu_q, 13, return_attn_probs=True, **theirs)
    check([out, lse], packed(*qkv.unbind(1), cu_seqlens_q=cu_q, cu_seqlens_k=cu_q, **ours))


def test_gradients_of_packed_inputs() -> None:
    qkv, kv, q = normal(2, 9, 3, 4, 8), normal(2, 9, 2, 2, 8), normal(2, 9, 4, 8)

    def of_qkv(dtype: torch.dtype) -> list[torch.Tensor]:
        return gradients(lambda x: dense(*x.unbind(2), causal=True)(x.dtype)[0], qkv.to(dtype))

    def of_kv(dtype: torch.dtype) -> list[torch.Tensor]:
        return gradients(lambda q, x: dense(q, *x.unbind(2))(x.dtype)[0], q.to(dtype), kv.to(dtype))

    check(gradients(lambda x: flash_attn_qkvpacked_func(x, causal=True), qkv), of_qkv, factor=3)
    check(gradients(flash_attn_kvpacked_func, q, kv), of_kv, factor=3)


def test_gradients_of_packed_sequences() -> None:
    qkv, kv, q = normal(20, 3, 4, 8), normal(30, 2, 2, 8), normal(20, 4, 8)
    cu_q, cu_k = cumulative(13, 7), cumulative(11, 19)
    same = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q}
    other = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}

    def of_qkv(dtype: torch.dtype) -> list[torch.Tensor]:
        return gradients(lambda x: packed(*x.unbind(1), causal=True, **same)(x.dtype)[0], qkv.to(dtype))

    def of_kv(dtype: torch.dtype) -> list[torch.Tensor]:
        return gradients(lambda q, x: packed(q, *x.unbind(1), **other)(x.dtype)[0], q.to(dtype), kv.to(dtype))

    check(gradients(lambda x: flash_attn_varlen_qkvpacked_func(x, cu_q, 13, causal=True), qkv), of_qkv, factor=3)
    check(gradients(lambda q, x: flash_attn_varlen_kvpacked_func(q, x, cu_q, cu_k, 13, 19), q, kv), of_kv, factor=3)


def test_dropout_and_determinism_pass_through() -> None:
    q, k, v = normal(1, 40, 2, 8), normal(1, 40, 2, 8, seed=1), torch.ones(1, 40, 2, 8)
    torch.manual_seed(0)
    out = flash_attn_func(q, k, v, 0.5, deterministic=True)
    torch.manual_seed(0)
    assert torch.equal(flash_attn_func(q, k, v, dropout_p=0.5), out)
    assert out.std() > 0.05  # of rows that are all 1 without dropout
    assert abs(out.mean() - 1) < 0.2


def test_shapes_without_numbers() -> None:
    """Lengths that nobody can look at, as tracers have them."""
    with FakeTensorMode():
        x, ends = torch.empty(300, 4, 32), torch.empty(3, dtype=torch.int32)
        assert flash_attn_varlen_func(x, x, x, ends, ends, 300, 300).shape == x.shape
        q, cache, filled = torch.empty(2, 1, 4, 32), torch.empty(2, 50, 4, 32), torch.empty(2, dtype=torch.int32)
        assert flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=filled).shape == q.shape
