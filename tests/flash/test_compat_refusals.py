"""What flash-attn's functions refuse, before anything is launched or written."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from assay.flash.compat import (
    apply_rotary_emb,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    index_first_axis,
    pad_input,
    unpad_input,
)

from .compat_cases import NEW, TABLE, X, cumulative
from .rotary_cases import tables


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flash_attn_func(X[0], X, X), "q must have the shape (batch, length, heads, head dimension), got (4,"),
        (lambda: flash_attn_qkvpacked_func(X[None]), "qkv must have the shape (batch, length, 3, heads, head dim"),
        (lambda: flash_attn_varlen_func(X, X, X, 0, 0, 0, 0), "q must have the shape (all lengths, heads, head"),  # type: ignore[arg-type]
        (lambda: flash_attn_with_kvcache(X, X, X, NEW), "k and v must be given together"),
        (lambda: flash_attn_with_kvcache(X, X, X, NEW, NEW), "k and v need cache_seqlens"),
        (lambda: flash_attn_with_kvcache(X, X, X, cache_seqlens=5), "cache_seqlens must be 0 to 4: the cache has"),
        (lambda: flash_attn_with_kvcache(X, X, X, cache_seqlens=torch.tensor([0, -1])), "cache_seqlens must be 0 to 4"),
        (lambda: flash_attn_with_kvcache(X, X, X, num_splits=-1), "num_splits must be at least 0, got -1"),
        (
            lambda: flash_attn_with_kvcache(X, X, X, cache_batch_idx=torch.tensor([0, 3])),
            "cache_batch_idx must be 0 to 1, a row of the cache; got 3 for sequence 1",
        ),
        (lambda: flash_attn_with_kvcache(X, X, X, NEW, NEW[..., :4], cache_seqlens=0), "v must be (batch, new keys"),
        (lambda: flash_attn_with_kvcache(X, X, X, NEW.half(), NEW, cache_seqlens=0), "dtype and device of k_cache"),
        (lambda: flash_attn_with_kvcache(X, X, X, NEW, NEW, cache_seqlens=4), "0 to 3: the cache has a capacity of 4"),
        (
            lambda: flash_attn_with_kvcache(X, X, X, NEW, NEW, cache_seqlens=torch.tensor([0, 4])),
            "and 1 keys are new; got 4 for sequence 1",
        ),
        (lambda: flash_attn_with_kvcache(X, X, X, rotary_cos=X[0, 0]), "rotary_cos and rotary_sin must be given tog"),
        (
            lambda: flash_attn_with_kvcache(X, X, X, None, None, X[0, 0], X[0, 0]),
            "rotary_cos and rotary_sin need k and",
        ),
        (
            lambda: flash_attn_with_kvcache(X, X, X, NEW, NEW, X[0, 0, :, :4], X[0, 0, :, :4], 1),
            "a row for every position in the cache, 4, got 2",
        ),
        (
            lambda: flash_attn_with_kvcache(X, X, X, block_table=TABLE, cache_batch_idx=TABLE[:, 0]),
            "block_table excludes cache_batch_idx and cache_leftpad",
        ),
        (
            lambda: flash_attn_with_kvcache(X, X[:1].expand(2, -1, -1, -1), X, NEW, NEW, cache_seqlens=0),
            "k_cache must have a place in memory for each of its numbers",
        ),
        (
            lambda: flash_attn_with_kvcache(X, X, X[:, :1].expand(-1, 4, -1, -1), NEW, NEW, cache_seqlens=0),
            "v_cache must have a place in memory for each of its numbers",
        ),
        (
            lambda: flash_attn_with_kvcache(X, X, X, NEW, NEW, cache_seqlens=0, cache_batch_idx=torch.tensor([1, 1])),
            "a row of its own for each sequence, since keys are written to it; got 1 for sequences 0 and 1",
        ),
        (lambda: apply_rotary_emb(X[0], X[0, 0], X[0, 0]), "x must have the shape (batch, length, heads"),
        (lambda: apply_rotary_emb(X, *tables(4)[:2], seqlen_offsets=45), "there are positions up to 48"),
        (lambda: apply_rotary_emb(X, *tables(4)[:2], seqlen_offsets=TABLE), "Offsets must be int32 of shape"),
        (lambda: apply_rotary_emb(X, *tables(4)[:2], seqlen_offsets=0.5), "must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
    assert not X.any()  # nothing was written


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flash_attn_func(X, X, X, window_size=5), "window_size must be (left, right)"),  # type: ignore[arg-type]
        (lambda: flash_attn_func(X, X, X, window_size=(1, None)), "must be two whole numbers"),  # type: ignore[arg-type]
        (lambda: flash_attn_varlen_func(X[0], X[0], X[0], None, None, 4, 4), "cu_seqlens_q must be an int32 tensor"),  # type: ignore[arg-type]
        (
            lambda: flash_attn_varlen_func(X[0], X[0], X[0, :3], cumulative(3), cumulative(3), 4, 4),
            "k and v must have one packed length, got 4 and 3",
        ),
        (
            lambda: flash_attn_varlen_func(X[0], X[0], X[0], cumulative(4), cumulative(5), 4, 4),
            "packed length 4; it begins with 0 and ends with 5",
        ),
        (lambda: apply_rotary_emb(X[0], *tables(4)[:2], cu_seqlens=[0, 4]), "cu_seqlens must be an int32 tensor"),  # type: ignore[arg-type]
        (
            lambda: apply_rotary_emb(X[0], *tables(4)[:2], cu_seqlens=TABLE[:0, 0]),
            "cu_seqlens must have an entry for every sequence, at least 1, and the end; got 0",
        ),
        (lambda: apply_rotary_emb(X.int(), *tables(4)[:2]), "What is rotated must be float, got torch.int32"),
        (
            lambda: unpad_input(X, torch.ones(2, 3)),
            "attention_mask must have the batch and length of hidden_states, (2",
        ),
        (
            lambda: unpad_input(X, torch.ones(4)),
            "attention_mask must have the shape (batch, length) = (2, 4), got (4,)",
        ),
        (lambda: unpad_input(X, torch.ones(2, 4), torch.ones(2, 5)), "unused_mask must have the batch and length"),
        (lambda: unpad_input(X[:0], torch.ones(0, 4)), "a batch of at least 1, got 0"),
        (lambda: unpad_input(torch.zeros(4), torch.ones(4)), "hidden_states must be a tensor of shape (batch, length,"),
        (
            lambda: pad_input(X[0], torch.tensor([0, 1, 2, 8]), 2, 4),
            "indices must be 0 to 7, one of the 8 rows; got 0 to",
        ),
        (lambda: pad_input(X[0], torch.tensor([0, 1, -2, 7]), 2, 4), "one of the 8 rows; got -2 to 7"),
        (lambda: pad_input(X[0], torch.arange(3), 2, 4), "indices must be int32 of shape (tokens,) = (4,)"),
        (lambda: pad_input(X[0], torch.arange(4.0), 2, 4), "got torch.float32 (4,)"),
        (lambda: pad_input(X[0], torch.arange(4), 2.5, 4), "batch must be a whole number, got 2.5"),  # type: ignore[arg-type]
        (lambda: index_first_axis(X, torch.tensor([2])), "indices must be 0 to 1"),
        (lambda: index_first_axis(X, [0]), "indices must be an int32 tensor of shape (tokens,), got list"),  # type: ignore[arg-type]
    ],
)
def test_refuses_more(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_changed_indices_are_read_again() -> None:
    indices = torch.arange(4)
    pad_input(X[0], indices, 2, 4)
    indices.numpy()[1] = 9  # of which the tensor's version does not tell
    with pytest.raises(ValueError, match="got 0 to 9"):
        pad_input(X[0], indices, 2, 4)
