"""flash-attn's functions: their signatures as published, their results as the formula reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from assay.flash import compat
from assay.flash.compat import (
    apply_rotary_emb,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    index_first_axis,
    pad_input,
    unpad_input,
)

from .cases import error, largest
from .reference import reference_attention
from .rotary_cases import by_complex_numbers, tables

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

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (5, 3)}, {"window": (5, 3)}),
    "window on one side": ({"window_size": (-1, 2)}, {"window": (None, 2)}),
    "window, causal": ({"window_size": (4, -1), "causal": True}, {"window": (4, None), "causal": True}),
    "softcap and scale": ({"softcap": 2.0, "softmax_scale": 0.7}, {"softcap": 2.0, "scale": 0.7}),
    "alibi": ({"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},) * 2,
    "alibi of each": ({"alibi_slopes": torch.linspace(0.0, 0.7, 8).view(2, 4)},) * 2,
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cumulative(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def check(ours: list[torch.Tensor], reference: Callable[[torch.dtype], list[torch.Tensor]], factor: int = 2) -> None:
    """At most `factor` times the error of plain attention in FP32, plus a few roundings."""
    for x, truth, plain in zip(ours, reference(torch.float64), reference(torch.float32), strict=True):
        assert x.shape == truth.shape
        rounding = 4 * torch.finfo(torch.float32).eps * max(1.0, largest(truth))
        assert error(x, truth) <= factor * error(plain, truth) + rounding


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable[..., list[torch.Tensor]]:
    """The reference's output and LSE for inputs (B, N, H, D)."""

    def in_dtype(dtype: torch.dtype) -> list[torch.Tensor]:
        out, lse = reference_attention(*(x.to(dtype).transpose(1, 2) for x in (q, k, v)), **options)
        return [out.transpose(1, 2), lse]

    return in_dtype


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable[..., list[torch.Tensor]]:
    """The same for inputs (all lengths, H, D)."""

    def in_dtype(dtype: torch.dtype) -> list[torch.Tensor]:
        out, lse = reference_attention(*(x.to(dtype).transpose(0, 1)[None] for x in (q, k, v)), **options)
        return [out[0].transpose(0, 1), lse[0]]

    return in_dtype


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
    assert torch.equal(flash_attn_func(q, k, v, softcap=-1.0), flash_attn_func(q, k, v))
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


def gradients(attend: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> list[torch.Tensor]:
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    out = attend(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return list(torch.autograd.grad((out * weights).sum(), leaves))


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


def paged(k: torch.Tensor, lengths: tuple[int, ...], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed keys in pages that lie in no order, and their table; what is not a key is NaN."""
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
    pages = torch.full((sum(counts), size, *k.shape[1:]), torch.nan)
    table, first = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32), 0
    for b, length in enumerate(lengths):
        for i in range(counts[b]):
            table[b, i] = order.pop()
            part = k[first + i * size : first + min((i + 1) * size, length)]
            pages[table[b, i], : len(part)] = part
        first += length
    return pages, table


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


LENGTHS = (3, 9)


def cache_parts(capacity: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of two sequences; what is not there yet is NaN."""
    k, v = normal(2, capacity, 2, 8, seed=1), normal(2, capacity, 2, 8, seed=2)
    for b, length in enumerate(LENGTHS):
        k[b, length:], v[b, length:] = torch.nan, torch.nan
    return k, v


def check_sequences(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    **options: Any,
) -> None:
    """Each sequence by itself, over its own keys (N, H, D)."""
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        check([out[b : b + 1], lse[b : b + 1]], dense(q[b : b + 1], k[None], v[None], **options))


def joined(cache: torch.Tensor, new: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    return [torch.cat((cache[b, :length], new[b])) for b, length in enumerate(lengths)]


@pytest.mark.parametrize("name", ["plain", "causal", "window", "window, causal", "softcap and scale", "alibi"])
def test_cache_is_appended_to_in_place(name: str) -> None:
    theirs, ours = OPTIONS[name]
    q, k, v = normal(2, 2, 4, 8), normal(2, 2, 2, 8, seed=3), normal(2, 2, 2, 8, seed=4)
    k_cache, v_cache = cache_parts()
    before = k_cache.clone(), v_cache.clone()
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(LENGTHS), num_splits=3, return_softmax_lse=True, **theirs
    )
    check_sequences(out, lse, q, joined(before[0], k), joined(before[1], v), **ours)
    for cache, old, new in zip((k_cache, v_cache), before, (k, v), strict=True):
        for b, length in enumerate(LENGTHS):
            old[b, length : length + 2] = new[b]
        assert torch.equal(cache.nan_to_num(99), old.nan_to_num(99))


def test_cache_of_one_length_and_a_full_one() -> None:
    q, k, v = normal(2, 1, 4, 8), normal(3, 7, 2, 8, seed=1), normal(3, 7, 2, 8, seed=2)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=4, return_softmax_lse=True)
    check([out, lse], dense(q, k[:2, :4], v[:2, :4]))
    out, lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    check([out, lse], dense(q, k[:2], v[:2]))
    new = normal(2, 1, 2, 8, seed=3)
    flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=4)
    assert torch.equal(k[:2, 4], new[:, 0])
    assert torch.equal(v[:2, 4], new[:, 0])


def test_cache_rows_and_left_padding() -> None:
    q, k, v = normal(2, 2, 4, 8), normal(2, 2, 2, 8, seed=3), normal(2, 2, 2, 8, seed=4)
    rows, leftpad = torch.tensor([3, 1]), torch.tensor([2, 5], dtype=torch.int32)
    dense_caches = [torch.full((4, 16, 2, 8), torch.nan) for _ in range(2)]
    for cache, part in zip(dense_caches, cache_parts(), strict=True):
        cache[rows] = part
    for left in (None, leftpad):
        # Also caches whose rows do not follow each other in memory.
        for k_cache, v_cache in (dense_caches, [torch.stack((c, c), 1)[:, 0] for c in dense_caches]):
            out, lse = flash_attn_with_kvcache(
                q,
                k_cache,
                v_cache,
                k,
                v,
                cache_seqlens=torch.tensor(LENGTHS),
                cache_batch_idx=rows,
                cache_leftpad=left,
                causal=True,
                return_softmax_lse=True,
            )
            starts = (0, 0) if left is None else (2, 5)
            of_k, of_v = (joined(x[rows], new) for x, new in ((k_cache, k), (v_cache, v)))
            keys, values = ([x[start:] for x, start in zip(part, starts, strict=True)] for part in (of_k, of_v))
            check_sequences(out, lse, q, keys, values, causal=True)
            assert torch.equal(k_cache[3, 3:5], k[0])


def test_left_padding_of_a_full_cache_without_rows() -> None:
    q, k, v = normal(2, 1, 4, 8), normal(2, 7, 2, 8, seed=1), normal(2, 7, 2, 8, seed=2)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_leftpad=torch.tensor([6, 0]), return_softmax_lse=True)
    check_sequences(out, lse, q, [k[0, 6:], k[1]], [v[0, 6:], v[1]])


def test_left_padding_within_the_new_keys() -> None:
    """A padded prompt goes into an empty cache as it is."""
    q, k, v = normal(2, 5, 4, 8), normal(2, 5, 2, 8, seed=3), normal(2, 5, 2, 8, seed=4)
    k_cache, v_cache = torch.full((2, 8, 2, 8), torch.nan), torch.full((2, 8, 2, 8), torch.nan)
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=0,
        cache_leftpad=torch.tensor([3, 0], dtype=torch.int32),
        return_softmax_lse=True,
    )
    check_sequences(out, lse, q, [k[0, 3:], k[1]], [v[0, 3:], v[1]])


def test_paged_cache_is_appended_to_in_place() -> None:
    q, k, v = normal(2, 2, 4, 8), normal(2, 2, 2, 8, seed=3), normal(2, 2, 2, 8, seed=4)
    k_all, v_all = cache_parts(12)
    size, table = 4, torch.tensor([[5, 2, 0], [1, 4, 3]], dtype=torch.int32)
    k_pages, v_pages = (torch.full((6, size, 2, 8), torch.nan) for _ in range(2))
    for pages, whole in ((k_pages, k_all), (v_pages, v_all)):
        pages[table] = whole.unflatten(1, (3, size))
    arguments: dict[str, Any] = {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32), "block_table": table}
    out, lse = flash_attn_with_kvcache(q, k_pages, v_pages, k, v, causal=True, return_softmax_lse=True, **arguments)
    check_sequences(out, lse, q, joined(k_all, k), joined(v_all, v), causal=True)
    assert torch.equal(k_pages[5, 3], k[0, 0])  # key 3 of the first sequence ends a page, key 4 begins the next
    assert torch.equal(k_pages[2, 0], k[0, 1])
    assert torch.equal(v_pages[3, 1:3], v[1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "window"])
def test_rotary_in_the_cache(name: str, interleaved: bool) -> None:
    theirs, ours = OPTIONS[name]
    q, k, v = normal(2, 3, 4, 8), normal(2, 3, 2, 8, seed=3), normal(2, 3, 2, 8, seed=4)
    k_cache, v_cache = cache_parts()
    before = k_cache.clone(), v_cache.clone()
    cos, sin, _ = tables(3, torch.float32, positions=16)
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cos,
        sin,
        torch.tensor(LENGTHS, dtype=torch.int32),
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **theirs,
    )
    places = torch.tensor(LENGTHS)[:, None] + torch.arange(3)
    of_q = places if name != "plain" else places[:, :1].expand(2, 3)  # without an order they stand at one position
    q, k = (
        by_complex_numbers(x.transpose(1, 2), at, 3, interleaved).transpose(1, 2).float()
        for x, at in ((q, of_q), (k, places))
    )
    for b, length in enumerate(LENGTHS):
        torch.testing.assert_close(k_cache[b, length : length + 3], k[b], rtol=1e-6, atol=1e-6)
    for b, (keys, values) in enumerate(zip(joined(before[0], k), joined(before[1], v), strict=True)):
        truth, truth_lse = dense(q[b : b + 1], keys[None], values[None], **ours)(torch.float64)
        torch.testing.assert_close(out[b : b + 1].double(), truth, rtol=0, atol=5e-6)
        torch.testing.assert_close(lse[b : b + 1].double(), truth_lse, rtol=0, atol=5e-6)


def test_cache_step_compiles_in_one_graph_and_runs_in_inference_mode() -> None:
    cos, sin, _ = tables(4, torch.float32, positions=16)
    q, k, v = normal(2, 1, 4, 8), normal(2, 1, 2, 8, seed=3), normal(2, 1, 2, 8, seed=4)

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True)
        return result

    def run(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        k_cache, v_cache = (x.nan_to_num() for x in cache_parts())
        return function(k_cache, v_cache, torch.tensor(LENGTHS, dtype=torch.int32)), k_cache, v_cache

    eager, compiled = run(step), run(torch.compile(step, fullgraph=True, backend="aot_eager"))
    with torch.inference_mode():
        inferred = run(step)
    for results in (compiled, inferred):
        assert all(torch.equal(ours, expected) for ours, expected in zip(results, eager, strict=True))


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


def first_of(results: Callable[[torch.dtype], list[torch.Tensor]], dtype: torch.dtype) -> list[torch.Tensor]:
    return results(dtype)[:1]


def test_attention_of_a_padded_batch() -> None:
    """As models do it: without padding, packed, and back; a sequence of nothing but padding stays 0."""
    qkv, mask = normal(3, 6, 3, 4, 8), torch.arange(6) < torch.tensor([[4], [0], [6]])
    tokens, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)
    out = pad_input(flash_attn_varlen_qkvpacked_func(tokens, cu_seqlens, longest, causal=True), indices, 3, 6)
    for b, length in ((0, 4), (2, 6)):
        whole = dense(*qkv[b : b + 1, :length].unbind(2), causal=True)
        check([out[b : b + 1, :length]], partial(first_of, whole))
    assert not out[1].any()


X = torch.zeros(2, 4, 2, 8)
NEW = torch.zeros(2, 1, 2, 8)
TABLE = torch.zeros(2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flash_attn_func(X[0], X, X), "q must have the shape (batch, length, heads, head dimension), got (4,"),
        (lambda: flash_attn_qkvpacked_func(X[None]), "qkv must have the shape (batch, length, 3, heads, head dim"),
        (lambda: flash_attn_varlen_func(X, X, X, 0, 0, 0, 0), "q must have the shape (all lengths, heads, head"),  # type: ignore[arg-type]
        (lambda: flash_attn_with_kvcache(X, X, X, NEW), "k and v must be given together"),
        (lambda: flash_attn_with_kvcache(X, X, X, NEW, NEW), "k and v need cache_seqlens"),
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
        (lambda: flash_attn_with_kvcache(X.clone().requires_grad_(), X, X), "has no gradient"),
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


@pytest.mark.parametrize(
    "bad",
    [{"softmax_scale": float("nan")}, {"alibi_slopes": torch.ones(3)}, {"num_splits": -1}, {"softcap": float("nan")}],
    ids=lambda bad: next(iter(bad)),
)
def test_a_refused_call_leaves_the_cache_alone(bad: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in range(3))
    caches = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 4, 16)
    with pytest.raises(ValueError):
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=torch.tensor([1, 2], dtype=torch.int32), **bad)
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("given", ["alone", "rotary", "paged"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"cache_seqlens": torch.tensor([-2, 3])}, "cache_seqlens must be 0 to 5"),
        ({"cache_seqlens": -2}, "cache_seqlens must be 0 to 5"),
        ({"cache_seqlens": torch.tensor([1, 6])}, "3 keys are new; got 6 for sequence 1"),
        ({"cache_seqlens": torch.tensor([1.0, 2.5])}, "cache_seqlens must be int32 of shape (batch,) = (2,)"),
        ({"cache_seqlens": torch.tensor([1, 2, 3])}, "got torch.int64 (3,)"),
        ({"cache_seqlens": torch.tensor([True, False])}, "got torch.bool (2,)"),
        ({"cache_seqlens": [1, 2]}, "or a whole number, got [1, 2]"),
        ({"cache_seqlens": 1.5}, "or a whole number, got 1.5"),
        ({"k": [1]}, "k must have the shape (batch, new keys, KV heads, head dimension), got list"),
        ({"k": torch.zeros(3)}, "k must have the shape (batch, new keys, KV heads, head dimension), got (3,)"),
        ({"window_size": 5}, "window_size must be (left, right)"),
    ],
)
def test_bad_lengths_and_keys_leave_the_cache_alone(bad: dict[str, Any], message: str, given: str) -> None:
    new = torch.ones(2, 3, 4, 8)
    caches = torch.zeros(2, 8, 4, 8), torch.zeros(2, 8, 4, 8)
    arguments: dict[str, Any] = {"k": new, "v": new, "cache_seqlens": 1} | bad
    if given == "rotary":
        arguments["rotary_cos"], arguments["rotary_sin"], _ = tables(4, torch.float32, positions=8)
    if given == "paged":
        arguments["block_table"] = torch.tensor([[1], [0]], dtype=torch.int32)
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_with_kvcache(new, *caches, **arguments)
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("appended", [True, False])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"cache_leftpad": torch.tensor([0, -2])}, "cache_leftpad must be 0 to the length of its sequence with k"),
        ({"cache_leftpad": torch.tensor([0, 6])}, "got 6 for sequence 1"),
        ({"cache_leftpad": 2}, "cache_leftpad must be an int32 tensor of shape (batch,) = (2,), got int"),
        ({"cache_leftpad": torch.tensor([0.0, 1.0])}, "got torch.float32 (2,)"),
        ({"cache_batch_idx": [0, 1]}, "cache_batch_idx must be an int32 tensor of shape (batch,) = (2,), got list"),
        ({"cache_batch_idx": torch.tensor([0, 1, 2])}, "cache_batch_idx must be int32 of shape (batch,) = (2,)"),
        ({"cache_batch_idx": torch.tensor([0, -1])}, "got -1 for page 0 of sequence 1"),
    ],
)
def test_bad_places_leave_the_cache_alone(bad: dict[str, Any], message: str, appended: bool) -> None:
    new = torch.ones(2, 3, 4, 8)
    caches = torch.zeros(3, 8, 4, 8), torch.zeros(3, 8, 4, 8)
    arguments: dict[str, Any] = {"cache_seqlens": 2} | ({"k": new, "v": new} if appended else {})
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_with_kvcache(new, *caches, **(arguments | bad))
    assert not any(cache.any() for cache in caches)


def test_tables_that_are_no_tensors_leave_the_cache_alone() -> None:
    new, cache = torch.ones(2, 3, 4, 8), torch.zeros(2, 8, 4, 8)
    with pytest.raises(ValueError, match="cos must be a torch tensor, got list"):
        flash_attn_with_kvcache(new, cache, cache, new, new, [1.0], [0.0], 1)  # type: ignore[arg-type]
    assert not cache.any()
