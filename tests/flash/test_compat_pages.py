"""Packed sequences of flash-attn's functions: over pages, and with a padded tail."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from assay.flash.compat import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func

from .compat_cases import check, cumulative, first_of, gradients, normal, packed, paged


@pytest.mark.parametrize("queries", [(5, 5, 5), (2, 7, 0)], ids=["equal", "different"])
def test_varlen_over_pages(queries: tuple[int, ...]) -> None:
    lengths = (11, 4, 9)
    q, k, v = normal(sum(queries), 4, 8), normal(24, 2, 8, seed=1), normal(24, 2, 8, seed=2)
    (k_pages, table), (v_pages, _) = paged(k, lengths, 4), paged(v, lengths, 4)
    cu_q, cu_k = cumulative(*queries), cumulative(*lengths)
    arguments = (cu_q, cu_k, max(queries), 11)
    out, lse, _ = flash_attn_varlen_func(
        q, k_pages, v_pages, *arguments, causal=True, block_table=table, return_attn_probs=True
    )
    check([out, lse], packed(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))

    def over_pages(q: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_attn_varlen_func(q, k_pages, v_pages, *arguments, block_table=table)
        return result

    def of_q(dtype: torch.dtype) -> list[torch.Tensor]:
        boundaries = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        return gradients(lambda q: packed(q, k, v, **boundaries)(dtype)[0], q.to(dtype))

    check(gradients(over_pages, q), of_q, factor=3)


@pytest.mark.parametrize("inference", [False, True])
def test_a_padded_tail_is_not_read_and_gives_0(inference: bool) -> None:
    q, k, v = normal(20, 4, 8), normal(30, 2, 8, seed=1), normal(30, 2, 8, seed=2)
    q[17:], k[27:], v[27:] = torch.nan, torch.nan, torch.nan
    with torch.inference_mode(inference):
        cu_q, cu_k = cumulative(13, 4), cumulative(11, 16)
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 13, 16, return_attn_probs=True)
        boundaries = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        check([out[:17], lse[:, :17]], packed(q[:17], k[:27], v[:27], **boundaries))
    assert out.shape == (20, 4, 8)
    assert not out[17:].any()
    assert (lse[:, 17:] == -torch.inf).all()


def test_gradients_of_a_padded_tail_are_0() -> None:
    qkv, cu = normal(20, 3, 4, 8), cumulative(13, 4)
    (grad,) = gradients(lambda x: flash_attn_varlen_qkvpacked_func(x, cu, 13), qkv)

    def of_qkv(dtype: torch.dtype) -> list[torch.Tensor]:
        boundaries = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}

        def padded(x: torch.Tensor) -> torch.Tensor:
            out = packed(*x[:17].unbind(1), **boundaries)(x.dtype)[0]
            return torch.cat((out, x.new_zeros(3, 4, 8)))

        return gradients(padded, qkv.to(dtype))

    check([grad], of_qkv, factor=3)
    assert not grad[17:].any()


def test_a_padded_tail_over_pages() -> None:
    """Also one that makes as many rows as equal sequences would have."""
    q, k, v = normal(6, 4, 8), normal(24, 2, 8, seed=1), normal(24, 2, 8, seed=2)
    (k_pages, table), (v_pages, _) = paged(k, (11, 4, 9), 4), paged(v, (11, 4, 9), 4)
    for queries in ((2, 1, 2), (1, 1, 1)):
        cu_q, cu_k, total = cumulative(*queries), cumulative(11, 4, 9), sum(queries)
        out = flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, max(queries), 11, block_table=table)
        whole = packed(q[:total], k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        check([out[:total]], partial(first_of, whole))
        assert out.shape == q.shape
        assert not out[total:].any()


def over_pages(
    queries: Any = (2, 7, 1), keys: Any = (11, 4, 9), most: Any = 7, spoiled: dict[tuple[int, int], int] | None = None
) -> None:
    """A call with boundaries, or lengths if a tuple, over 7 pages of 4."""
    pages, table = paged(normal(24, 2, 8), (11, 4, 9), 4)
    for place, page in (spoiled or {}).items():
        table[place] = page
    cu_q, cu_k = (cumulative(*x) if isinstance(x, tuple) else x for x in (queries, keys))
    flash_attn_varlen_func(normal(10, 4, 8), pages, pages, cu_q, cu_k, most, 11, block_table=table)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: over_pages(spoiled={(0, 1): 9}),
            "pages 0 to 6 wherever a sequence has keys, got 9 for page 1 of sequ",
        ),
        (lambda: over_pages(spoiled={(2, 0): -1}), "got -1 for page 0 of sequence 2"),
        (lambda: over_pages(keys=(11, 4, 13)), "capacity 12, got 13 for sequence 2"),
        (lambda: over_pages((2, 8), (11, 4)), "block_table must be int32 of shape (batch, pages of a sequence) = (2,"),
        (lambda: over_pages(torch.tensor([0, 7, 10]), torch.tensor([0, 11, 15]), 5), "block_table must be int32"),
        (lambda: over_pages((4, 4, 2), most=3), "max_seqlen_q must be at least the longest sequence's queries, 4, got"),
        (lambda: over_pages(most=3.5), "max_seqlen_q must be a whole number, got 3.5"),
        (lambda: over_pages(most=-1), "max_seqlen_q must be at least 0, got -1"),
        (lambda: over_pages(keys=torch.tensor([3, 11, 15, 24])), "cu_seqlens_k must begin with 0, never fall"),
        (lambda: over_pages(keys=torch.tensor([0, 11, 7, 24])), "entry 2 is 7, after 11"),
        (lambda: over_pages(queries=torch.tensor([0, 7, 2, 10])), "cu_seqlens_q must begin with 0, never fall"),
        (lambda: over_pages(queries=(2, 7, 9)), "end with the packed length 10; it begins with 0 and ends with 18"),
        (lambda: over_pages(keys=(11, 4)), "must be of the same sequences, got 4 and 3"),
        (lambda: over_pages(queries=[0, 2, 9, 10]), "cu_seqlens_q must be an int32 tensor of shape (sequences + 1,)"),
        (lambda: over_pages(keys=torch.tensor([0.0, 11, 15, 24])), "cu_seqlens_k must be int32 of shape"),
    ],
)
def test_refuses_over_pages(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "most", "message"),
    [
        ([0, 7, 10], [0, 7, 11], 5, "max_seqlen_q must be at least the longest sequence's queries, 7, got 5"),
        ([0, 5, 10], [3, 10, 14], 5, "cu_seqlens_k must begin with 0"),
        ([0, 5, 10], [0, 7, 24], 5, "capacity 12, got 17 for sequence 1"),
        ([0, 5, 10], [0, 7, 3], 5, "entry 2 is 3, after 7"),
    ],
)
def test_refuses_equal_lengths_over_pages(cu_q: list[int], cu_k: list[int], most: int, message: str) -> None:
    pages, table = paged(normal(19, 2, 8), (11, 8), 4)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_varlen_func(normal(10, 4, 8), pages, pages, cu_q, cu_k, most, 11, block_table=table)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_packed_sequences_say_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As reading waits for the GPU: of tensors that stay the same, not again."""
    cu_q, cu_k = cumulative(2, 7, 1).cuda(), cumulative(11, 4, 9).cuda()
    k, q = normal(24, 2, 8), normal(10, 4, 8).cuda()
    pages, table = (x.cuda() for x in paged(k, (11, 4, 9), 4))
    k = k.cuda()
    read, tolist = [], torch.Tensor.tolist

    def counted(x: torch.Tensor) -> Any:
        read.append(id(x))
        return tolist(x)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    for _ in range(3):
        flash_attn_varlen_func(q, pages, pages, cu_q, cu_k, 7, 11, block_table=table)
        flash_attn_varlen_func(q, k, k, cu_q, cu_k, 7, 11)
    assert [read.count(id(x)) for x in (cu_q, cu_k)] == [1, 1]
