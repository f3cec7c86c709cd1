"""`attention_with_cache`: a few new queries against a cache of keys and values, dense or in pages."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from assay.flash import checks, cpu
from assay.flash.call import Call
from assay.flash.layout import empty_heads_last
from assay.flash.library import in_forward_mode, operator


class _Options(TypedDict, total=False):
    lengths: Tensor | int | None
    block_table: Tensor | None
    causal: bool
    scale: float | None
    window: checks.Window | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    splits: int | None
    batch_invariant: bool


@overload
def attention_with_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[_Options]
) -> Tensor: ...
@overload
def attention_with_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    lengths: Tensor | int | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: checks.Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    splits: int | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest queries of each sequence over its cached keys: decoding, with or without speculation.

    The keys of a sequence are shared out among programs that fill the GPU, and their results merged. The keys of the
    new queries must be in the cache already. There is no gradient.

    Args:
        q: (batch, heads, queries, D), any strides. D from 1 to 256.
        k_cache: (batch, KV heads, capacity, D), any strides; with a block table (pages, KV heads, page size, D).
        v_cache: (batch, KV heads, capacity, D_v), or (pages, KV heads, page size, D_v).
        lengths: How many keys each sequence has: (batch,) int32, or one number for all; None: as many as fit. What the
            cache holds beyond them is not read.
        block_table: (batch, pages of a sequence) int32: key j of sequence b is in page block_table[b, j // page size],
            at j % page size. Entries beyond the length are not read.
        causal: Hide later keys. Query i stands at position length − queries + i: the last beside the last key.
        scale: Of the scores; None: 1/√D.
        window: (left, right): keys at most so far before and after a query's position; None: no limit on that side.
        softcap: Scores become softcap · tanh(scores / softcap).
        alibi_slopes: (heads,) or (batch, heads): −slope · distance is added to the scores.
        sinks: (heads,): the logit of one more key without a value, seen by every query.
        return_lse: Also return the log-sum-exp of every row's scores, (batch, heads, queries) in FP32.
        splits: Into how many shares a sequence's keys are cut; None: by the size of the GPU. No matter on the CPU.
        batch_invariant: A sequence's result has the same bits whatever else is in the batch.

    Rows that see no key give 0 and an LSE of −inf (or the sink). The values of `lengths` and `block_table` are checked
    at every call on the CPU; on CUDA once for each version of the tensors, which waits for the GPU; within
    torch.inference_mode, where tensors have no version, every time; never while a CUDA graph is captured.
    """
    checks.check_cache(q, k_cache, v_cache, block_table)
    checks.check_flag("return_lse", return_lse)
    batch_invariant = checks.check_flag("batch_invariant", batch_invariant)
    left, right, scale, softcap, alibi_slopes = checked_options(
        q, causal, scale, window, softcap, alibi_slopes, splits, batch_invariant
    )
    if sinks is not None:
        sinks = checks.check_sinks(sinks, q.shape[1], q.device)
    _check_no_gradient(q, k_cache, v_cache, sinks)
    longest = k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    lengths, longest = checks.check_lengths(lengths, q, longest)
    out, lse = decode(
        q, k_cache, v_cache, lengths, block_table, alibi_slopes, sinks, longest, scale, left, right,
        softcap, splits, batch_invariant,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def checked_options(
    q: Tensor,
    causal: bool,
    scale: float | None,
    window: checks.Window | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    splits: int | None = None,
    batch_invariant: bool = False,
) -> tuple[int | None, int | None, float, float | None, Tensor | None]:
    """The sides of the window, the scale, the softcap and the slopes as the operator takes them."""
    left, right = checks.check_window(window, causal)
    scale = q.shape[3] ** -0.5 if scale is None else checks.check_number("scale", scale, -float("inf"), float("inf"))
    if softcap is not None:
        # 0 is flash-attention's way of saying none
        softcap = checks.check_number("softcap", softcap, 0, float("inf")) or None
    _check_splits(splits, batch_invariant)
    if alibi_slopes is not None:
        alibi_slopes = checks.check_slopes(alibi_slopes, q.shape[0], q.shape[1], q.device)
    return left, right, scale, softcap, alibi_slopes


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCall:
    """One call after its checks."""

    q: Tensor
    """(B, H, queries, D)."""
    k: Tensor
    """(B, H_kv, capacity, D), or pages: (pages, H_kv, page size, D)."""
    v: Tensor
    lengths: Tensor | None
    """(B,) int32; None: `longest`, each of them."""
    table: Tensor | None
    """(B, pages of a sequence) int32; None: the cache is not paged."""
    slopes: Tensor | None
    """(B, H) FP32."""
    sinks: Tensor | None
    """(H,)."""
    longest: int
    """No sequence has more keys."""
    scale: float
    left: int | None
    right: int | None
    softcap: float | None
    splits: int | None
    batch_invariant: bool


def flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    longest: int,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    splits: int | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Output, (B, queries, H, D_v) in memory, and LSE. The arguments are those of a `CacheCall`."""
    call = CacheCall(
        q=q, k=k, v=v, lengths=lengths, table=table, slopes=slopes, sinks=sinks, longest=longest, scale=scale,
        left=left, right=right, softcap=softcap, splits=splits, batch_invariant=batch_invariant,
    )  # fmt: skip
    checks.check_cache_values(lengths, table, longest, k.shape[0], k.shape[2])
    if not q.is_cuda:
        return by_sequence(call)
    with torch.cuda.device(q.device):  # Triton launches on the current device, whatever its arguments say
        launched: tuple[Tensor, Tensor] = import_module("assay.flash.decode_launch").launch(call)
        return launched


def empty_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """For the output and the LSE."""
    out = empty_heads_last(q, (*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


decode = operator(flash_decode, fake=empty_results)


def by_sequence(call: CacheCall) -> tuple[Tensor, Tensor]:
    """On the CPU: the keys of each sequence by themselves, as `flash_attention` takes them."""
    out, lse = empty_results(call.q, call.k, call.v)
    lengths = [call.longest] * len(call.q) if call.lengths is None else call.lengths.tolist()
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = Call(
            q=call.q[one],
            k=_keys_of(call, call.k, b, length),
            v=_keys_of(call, call.v, b, length),
            scale=call.scale,
            left=call.left,
            right=call.right,
            softcap=call.softcap,
            slopes=None if call.slopes is None else call.slopes[one],
            sinks=call.sinks,
            batch_invariant=call.batch_invariant,
        )
        out[one], lse[one] = cpu.forward(alone)
    return out, lse


def _keys_of(call: CacheCall, cache: Tensor, b: int, length: int) -> Tensor:
    """(1, H_kv, length, D) of sequence b."""
    if call.table is None:
        return cache[b : b + 1, :, :length]
    pages = call.table[b, : -(-length // cache.shape[2])].long()
    return cache[pages].transpose(0, 1).flatten(1, 2)[None, :, :length]


def _check_no_gradient(*inputs: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise ValueError(
            "attention_with_cache has no gradient, and an input requires one. Use flash_attention, or call it within "
            "torch.no_grad()."
        )
    if in_forward_mode() and any(x is not None and _in_forward_mode(x) for x in inputs):
        raise NotImplementedError(
            "attention_with_cache has no forward-mode derivative (torch.func.jvp, jacfwd; dual tensors), and an input "
            "is differentiated so. Compute attention in plain torch operations (softmax(q @ k.mT * scale) @ v)."
        )


def _in_forward_mode(x: Tensor) -> bool:
    """Whether x is a dual tensor, or torch.func.jvp made it: at which of its levels cannot be told from here."""
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(x):
        x = functorch.get_unwrapped(x)
    return functorch.is_gradtrackingtensor(x) or forward_ad.unpack_dual(x).tangent is not None


def _check_splits(splits: int | None, batch_invariant: bool) -> None:
    if splits is None:
        return
    if isinstance(splits, bool) or not isinstance(splits, int) or splits < 1:
        raise ValueError(f"splits must be a whole number of at least 1, or None (by the GPU), got {splits!r}.")
    if batch_invariant:
        raise ValueError("splits and batch_invariant exclude each other: invariance needs splits of a fixed size.")
