"""flash-attn's attention over a cache: appended to in place, rotated, paged, and left alone by a refused call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from assay.flash.compat import flash_attn_with_kvcache

from .compat_cases import LENGTHS, OPTIONS, cache_parts, check, check_sequences, dense, joined, normal
from .rotary_cases import by_complex_numbers, tables


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


def test_nothing_has_a_gradient_and_numbers_may_be_numpys() -> None:
    q, k, v = normal(2, 2, 4, 8), normal(2, 7, 2, 8, seed=1), normal(2, 7, 2, 8, seed=2)
    new, slopes = normal(2, 2, 2, 8, seed=3), torch.rand(4, generator=torch.Generator().manual_seed(0))
    want = flash_attn_with_kvcache(
        q, k.clone(), v.clone(), new, new, cache_seqlens=3, window_size=(2, 0), alibi_slopes=slopes
    )
    query, key, value, more = (torch.nn.Parameter(x.clone()) for x in (q, k, v, new))
    out = flash_attn_with_kvcache(
        query,
        key,
        value,
        more,
        more,
        cache_seqlens=np.int64(3),  # type: ignore[arg-type]
        window_size=(np.int32(2), np.int64(0)),  # type: ignore[arg-type]
        alibi_slopes=torch.nn.Parameter(slopes),
    )
    assert not out.requires_grad
    assert torch.equal(out, want)
    out *= torch.nn.Parameter(torch.ones(1))  # as it may be with flash-attn's
    assert torch.equal(key[:, 3:5], new)


def test_rows_that_several_sequences_read() -> None:
    q, k, v = normal(2, 1, 4, 8), normal(1, 7, 2, 8, seed=1), normal(1, 7, 2, 8, seed=2)
    want = dense(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
    keys, values = (x.expand(2, -1, -1, -1) for x in (k, v))
    check(list(flash_attn_with_kvcache(q, keys, values, return_softmax_lse=True)), want)
    rows = torch.tensor([0, 0])
    check(list(flash_attn_with_kvcache(q, k, v, cache_batch_idx=rows, return_softmax_lse=True)), want)


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
        (
            {"cache_batch_idx": torch.tensor([0, -1])},
            "cache_batch_idx must be 0 to 2, a row of the cache; got -1 for sequence 1",
        ),
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
