"""`attention_with_cache`: a few new queries against a cache of keys and values, dense or in pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from assay.flash import checks, cpu
from assay.flash.call import Call
from assay.flash.library import in_forward_mode, operator
from assay.flash.tuning import Tile

_LOG2_E = 1.4426950408889634
_LEAST_KEYS = 128
"""Of a split: below this its start and its share of the merge take longer than its keys."""
_INVARIANT_KEYS = 512
"""Of a split, always, if the batch must not change a sequence's bits."""
_PROGRAMS = 2
"""For each multiprocessor of the GPU."""
_MERGED_AT_ONCE = 16
_FAR = 2**30
"""A window's side beyond all lengths, within int32."""


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
        None if softcap is None else float(softcap), splits, batch_invariant,
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
    scale = _check_scores(scale, softcap, q.shape[3])
    _check_splits(splits, batch_invariant)
    if alibi_slopes is not None:
        alibi_slopes = checks.check_slopes(alibi_slopes, q.shape[0], q.shape[1], q.device)
    return left, right, scale, softcap or None, alibi_slopes  # 0 is flash-attention's way of saying no softcap


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
        return launch(call)


def _results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries = q.shape[:3]
    out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


decode = operator(flash_decode, fake=_results)


def by_sequence(call: CacheCall) -> tuple[Tensor, Tensor]:
    """On the CPU: the keys of each sequence by themselves, as `flash_attention` takes them."""
    out, lse = _results(call.q, call.k, call.v)
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
        )
        out[one], lse[one] = cpu.forward(alone)
    return out, lse


def _keys_of(call: CacheCall, cache: Tensor, b: int, length: int) -> Tensor:
    """(1, H_kv, length, D) of sequence b."""
    if call.table is None:
        return cache[b : b + 1, :, :length]
    pages = call.table[b, : _ceil(length, cache.shape[2])].long()
    return cache[pages].transpose(0, 1).flatten(1, 2)[None, :, :length]


def launch(call: CacheCall) -> tuple[Tensor, Tensor]:
    """On CUDA: one kernel over all splits, and where there are several, one that merges them."""
    q, k, v = call.q, call.k, call.v
    rows = q.shape[2] * (q.shape[1] // k.shape[1])
    tile = _tile(call, rows)
    row_blocks = _ceil(rows, tile.rows)
    splits, least = _splits(call, tile.columns, q.shape[0] * k.shape[1] * row_blocks)
    results: tuple[Tensor, Tensor] = _results(q, k, v)
    out, lse = (x[None] for x in results)
    if splits == 1:
        _attend(call, tile, row_blocks, least, out, lse)
        return results
    parts = _parts(results[0], splits)
    _attend(call, tile, row_blocks, least, *parts)
    _merge(call.sinks, *parts, out, lse)
    return results


def _attend(call: CacheCall, tile: Tile, row_blocks: int, least: int, out: Tensor, lse: Tensor) -> None:
    """Each split's output and LSE, (splits, B, H, queries, …)."""
    from assay.flash.kernels.decode import attention_decode  # Triton: not there on every machine
    from assay.flash.kernels.tile import Scores, Span, precision

    q, k, v, table, cap = call.q, call.k, call.v, call.table, call.softcap
    (batch, heads, queries, dim), kv_heads, splits = q.shape, k.shape[1], len(out)
    left, right = (None if side is None else min(side, _FAR) for side in (call.left, call.right))
    scale = call.scale * _LOG2_E if cap is None else call.scale / cap
    attention_decode[(splits * row_blocks * batch, kv_heads)](
        q,
        q.stride(),
        k,
        k.stride(),
        v,
        v.stride(),
        None if call.lengths is None else call.lengths.contiguous(),
        table,
        None if table is None else table.stride(),
        out,
        out.stride()[:4],
        lse,
        lse.stride(),
        None if call.sinks is None else call.sinks.contiguous(),
        Span(queries, None, left, right, None, None, None),
        Scores(scale, None if cap is None else cap * _LOG2_E, call.slopes, None, None, None, None, None, None),
        call.longest,
        heads,
        splits,
        least,
        splits == 1,
        heads // kv_heads,
        None if table is None else k.shape[2],
        dim,
        v.shape[3],
        tile.rows,
        tile.columns,
        _power_of_two(dim),
        _power_of_two(v.shape[3]),
        precision(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _merge(sinks: Tensor | None, parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    from assay.flash.kernels.decode import merge_splits

    splits, batch, heads, queries, dim = parts.shape
    merge_splits[(batch * heads * queries,)](
        parts, parts.stride()[:4], part_lse, part_lse.stride(), out, out.stride()[:4], lse, lse.stride(),
        None if sinks is None else sinks.contiguous(), splits, heads, queries, dim, _power_of_two(dim), _MERGED_AT_ONCE,
    )  # fmt: skip


def _parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Room for each split's output and LSE, in FP32 and laid out as the output is."""
    parts = out.new_empty(splits, *out.transpose(1, 2).shape, dtype=torch.float32)
    return parts.transpose(2, 3), out.new_empty(splits, *out.shape[:3], dtype=torch.float32)


def _tile(call: CacheCall, rows: int) -> Tile:
    """Rows of one KV head, keys, warps and stages. With few rows all that counts is how many loads are under way."""
    wide = max(call.q.shape[3], call.v.shape[3]) > 128
    if call.q.dtype == torch.float32:
        return Tile(16, 32, 8, 2)
    rows = min(_power_of_two(rows), 128)
    warps = 8 if rows == 128 or (wide and rows == 64) else 4
    # Pages are loaded before their keys are: the same keys under way take twice the stages.
    return Tile(rows, 32 if wide else 64, warps, 3 if call.table is None else 5)


def _splits(call: CacheCall, columns: int, programs: int) -> tuple[int, int]:
    """Into how many splits the keys are cut, and how many blocks of keys a split has at the least.

    From what the host knows, the capacity: the kernel cuts the keys that a sequence has into as many parts. With a
    fixed size there are splits enough for all blocks, so that each is of the least size.
    """
    blocks = _ceil(call.longest, columns)
    if call.left is not None and call.right is not None:
        blocks = min(blocks, _ceil(call.left + call.right + call.q.shape[2], columns) + 1)
    if call.splits is not None:
        return call.splits, 1
    if call.batch_invariant:
        least = _INVARIANT_KEYS // columns
        return max(1, _ceil(blocks, least)), least
    least = _LEAST_KEYS // columns
    wanted = _ceil(_PROGRAMS * _multiprocessors(call.q.device), max(1, programs))
    return max(1, min(wanted, _ceil(blocks, least))), least


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _power_of_two(size: int) -> int:
    """The next from 16, the least that tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


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


def _check_scores(scale: float | None, softcap: float | None, dim: int) -> float:
    """The scale as a number."""
    if softcap is not None:
        checks.check_number("softcap", softcap, 0, float("inf"))
    if scale is None:
        return float(dim**-0.5)
    checks.check_number("scale", scale, -float("inf"), float("inf"))
    return float(scale)


def _check_splits(splits: int | None, batch_invariant: bool) -> None:
    if splits is None:
        return
    if isinstance(splits, bool) or not isinstance(splits, int) or splits < 1:
        raise ValueError(f"splits must be a whole number of at least 1, or None (by the GPU), got {splits!r}.")
    if batch_invariant:
        raise ValueError("splits and batch_invariant exclude each other: invariance needs splits of a fixed size.")
