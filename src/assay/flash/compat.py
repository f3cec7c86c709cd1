"""The functions of the flash-attn package, version 2, under their names, with their arguments, layouts and meanings.

`from assay.flash.compat import flash_attn_func` in place of `from flash_attn import flash_attn_func`; likewise for
`apply_rotary_emb` (of flash_attn.layers.rotary) and `pad_input`, `unpad_input`, `index_first_axis` (of
flash_attn.bert_padding). Heads stand after the length: (batch, length, heads, head dimension), packed (all lengths,
heads, head dimension).

What differs: every head dimension up to 256, all float dtypes, pages of any size and the CPU are taken; mistakes raise
ValueError; with `return_attn_probs` the third result is None, not the probabilities, which are never in memory; the LSE
of a row that sees no key is −inf, not +inf; rows behind the end of `cu_seqlens` give 0, and compiled code refuses them.
Results are typed `Any`, as those of the package are not typed: what they are depends on the arguments.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from assay.flash.attention import flash_attention
from assay.flash.checks import as_int32
from assay.flash.compat_cache import Cache, attend_with_new
from assay.flash.compat_checks import (
    DENSE,
    PACKED,
    check_boundaries,
    check_dim,
    check_indices,
    check_whole,
    check_window_size,
    used,
    values,
)
from assay.flash.compat_packed import attend_packed, attend_pages
from assay.flash.rotary import Rotary, rotated

__all__ = [
    "apply_rotary_emb",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "pad_input",
    "unpad_input",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q, k, v, each (batch, length, heads, head dimension); causal and windows align bottom-right.

    Args:
        q: Its heads may be a multiple of those of k and v.
        k: Keys.
        v: Values.
        dropout_p: The share of probabilities that is dropped; 0 when evaluating.
        softmax_scale: Of the scores; None: 1/√(head dimension).
        causal: Hide later keys.
        window_size: Keys at most so far before and after a query's position; −1: no limit.
        softcap: Scores become softcap · tanh(scores / softcap); 0 or less: they stay.
        alibi_slopes: (heads,) or (batch, heads): −slope · distance is added to the scores.
        deterministic: Gradients have the same bits every time.
        return_attn_probs: Return (out, softmax_lse (batch, heads, length), None) in place of out.
    """
    scores = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _dense(q, k, v, return_attn_probs, dropout_p=dropout_p, deterministic=deterministic, **scores)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor, (batch, length, 2, KV heads, head dimension)."""
    k, v = _parts("kv", kv, 2, 5, "(batch, length, 2, KV heads, head dimension)")
    scores = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _dense(q, k, v, return_attn_probs, dropout_p=dropout_p, deterministic=deterministic, **scores)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor, (batch, length, 3, heads, head dimension)."""
    q, k, v = _parts("qkv", qkv, 3, 5, "(batch, length, 3, heads, head dimension)")
    scores = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _dense(q, k, v, return_attn_probs, dropout_p=dropout_p, deterministic=deterministic, **scores)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of sequences one after the other, each within itself; the options are those of `flash_attn_func`.

    Args:
        q: (all lengths, heads, head dimension).
        k: (all lengths, KV heads, head dimension); with `block_table` (pages, page size, KV heads, head dimension).
        v: As k.
        cu_seqlens_q: (sequences + 1,) int32: where the queries of each sequence begin, and where the last one ends.
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: The longest sequence's queries, or more; only used with `block_table`.
        max_seqlen_k: Not used.
        dropout_p: See `flash_attn_func`, also for what follows.
        softmax_scale: Of the scores.
        causal: Hide later keys.
        window_size: (left, right).
        softcap: Of the scores.
        alibi_slopes: (heads,) or (sequences, heads).
        deterministic: Of the gradients.
        return_attn_probs: Return (out, softmax_lse (heads, all lengths), None) in place of out.
        block_table: (sequences, pages of a sequence) int32: the pages of each sequence. They are read where they lie if
            all sequences have max_seqlen_q queries and there is no gradient and no dropout; else they are copied first.
    """
    scores = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is None:
        options = scores | {"dropout_p": dropout_p, "deterministic": deterministic}
        out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    else:
        most = check_whole("max_seqlen_q", max_seqlen_q)
        out, lse = attend_pages(
            q, k, v, cu_seqlens_q, cu_seqlens_k, most, block_table, dropout_p, deterministic, scores
        )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor, (all lengths, 2, KV heads, head dimension)."""
    k, v = _parts("kv", kv, 2, 4, "(all lengths, 2, KV heads, head dimension)")
    options = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"dropout_p": dropout_p, "deterministic": deterministic}
    out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor, (all lengths, 3, heads, head dimension)."""
    q, k, v = _parts("qkv", qkv, 3, 4, "(all lengths, 3, heads, head dimension)")
    options = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"dropout_p": dropout_p, "deterministic": deterministic}
    out, lse = attend_packed(q, k, v, cu_seqlens, cu_seqlens, **options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write k and v into the cache, then attend over it. The result has no gradient, whatever the inputs require.

    Args:
        q: (batch, length, heads, head dimension).
        k_cache: (rows, capacity, KV heads, head dimension), or with `block_table` (pages, page size, KV heads, head
            dimension). Written to in place where k is given.
        v_cache: As k_cache.
        k: (batch, new keys, KV heads, head dimension): written behind the keys that are there.
        v: As k.
        rotary_cos: (positions, half the rotated dimensions): q and k are rotated, at positions from cache_seqlens on;
            without causal or a window all queries at cache_seqlens.
        rotary_sin: As rotary_cos.
        cache_seqlens: (batch,) int32 or one number: how many keys each sequence has, before k; None: the cache is full.
        cache_batch_idx: (batch,): which row of the cache a sequence has; None: 0, 1, …
        cache_leftpad: (batch,): where in its row a sequence begins, at its end with k at most; None: 0. Positions for
            rotary count from the row's beginning.
        block_table: (batch, pages of a sequence) int32. Excludes the two above.
        softmax_scale: Of the scores; None: 1/√(head dimension).
        causal: Hide later keys; the last query stands beside the last key.
        window_size: (left, right); −1: no limit.
        softcap: Of the scores; 0 or less: none.
        rotary_interleaved: Pairs are (0, 1), (2, 3), …; else (0, half), (1, half + 1), …
        alibi_slopes: (heads,) or (batch, heads).
        num_splits: Into how many shares the keys are cut; 0: by the size of the GPU.
        return_softmax_lse: Return (out, softmax_lse (batch, heads, length)) in place of out.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dim(name, x, 4, DENSE)
    rotary = None
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None:
            raise ValueError("rotary_cos and rotary_sin must be given together, or neither.")
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    cache = Cache(k_cache, v_cache, q.shape[0], block_table, cache_batch_idx, cache_leftpad)
    scores = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    splits = check_whole("num_splits", num_splits) or None
    with torch.no_grad():
        out, lse = attend_with_new(q, k, v, cache, cache_seqlens, rotary, splits, scores)
    out = out.detach()  # what no_grad made a view of, torch would let nobody write to
    return (out, lse) if return_softmax_lse else out


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Tensor | int = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x with the first 2 · (width of cos) dimensions of every head rotated by position.

    Args:
        x: (batch, length, heads, head dimension); with `cu_seqlens` (all lengths, heads, head dimension).
        cos: (positions, half the rotated dimensions).
        sin: As cos.
        interleaved: Pairs are (0, 1), (2, 3), …; else (0, half), (1, half + 1), …
        inplace: Write the result to x, and return that.
        seqlen_offsets: (sequences,) or one number: the position of each sequence's first row.
        cu_seqlens: (sequences + 1,) int32: where each packed sequence begins, and where the last one ends; rows behind
            it stay as they are.
        max_seqlen: Not used.
    """
    rotary = Rotary(cos, sin, interleaved)
    if cu_seqlens is None:
        check_dim("x", x, 4, DENSE)
        out = rotated(x.transpose(1, 2), rotary, seqlen_offsets).transpose(1, 2)
    else:
        check_dim("x", x, 3, f"{PACKED} with cu_seqlens")
        check_boundaries("cu_seqlens", cu_seqlens, x.device)
        cu_seqlens = as_int32(cu_seqlens).contiguous()
        part = used(x, values(cu_seqlens))
        out = rotated(part.transpose(0, 1)[None], rotary, seqlen_offsets, cu_seqlens)[0].transpose(0, 1)
        if len(part) < len(x):
            out = torch.cat((out, x[len(part) :]))
    return x.copy_(out) if inplace else out


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input` that `indices` name; differentiable."""
    _check_rows("input", input, 1, "(rows, …)")
    check_indices(indices, len(input), input.device)
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Take the padding out.

    Args:
        hidden_states: (batch, length, …).
        attention_mask: (batch, length), bool or int: 1 is a token.
        unused_mask: (batch, length): 1 is a token that is kept, but not counted as used.

    Returns:
        The tokens one after the other, (tokens, …); their places in the flattened batch; cu_seqlens (batch + 1,) int32;
        the longest sequence; and how many tokens each sequence uses, (batch,) int32.
    """
    _check_rows("hidden_states", hidden_states, 2, "(batch, length, …)")
    _check_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
    counted = attention_mask != 0
    kept = counted if unused_mask is None else counted | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = hidden_states.flatten(0, 1).index_select(0, indices)
    return tokens, indices, cu_seqlens, int(lengths.max()), counted.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens (tokens, …) back to their places in (batch, length, …), with 0 everywhere else."""
    _check_rows("hidden_states", hidden_states, 1, "(tokens, …)")
    rows, shape = check_whole("batch", batch) * check_whole("seqlen", seqlen), hidden_states.shape[1:]
    check_indices(indices, rows, hidden_states.device, len(hidden_states))
    padded = hidden_states.new_zeros(rows, *shape).index_copy(0, indices.long(), hidden_states)
    return padded.view(batch, seqlen, *shape)


def _scores(
    scale: float | None, causal: bool, window: tuple[int, int], softcap: float, slopes: Tensor | None
) -> dict[str, Any]:
    """These options as our functions take them: None in place of −1 and of a softcap that is not above 0."""
    if isinstance(softcap, int | float | Real) and softcap <= 0:
        softcap = 0.0
    return {
        "scale": scale,
        "causal": causal,
        "window": check_window_size(window),
        "softcap": softcap or None,
        "alibi_slopes": slopes.detach() if isinstance(slopes, Tensor) else slopes,  # they have no gradient there
    }


def _dense(q: Tensor, k: Tensor, v: Tensor, probabilities: bool, **options: Any) -> Any:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dim(name, x, 4, DENSE)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    return (out.transpose(1, 2), lse, None) if probabilities else out.transpose(1, 2)


def _parts(name: str, x: Tensor, count: int, dims: int, shape: str) -> tuple[Tensor, ...]:
    """What was stacked in the third dimension from the end; its gradient is stacked again in one go."""
    check_dim(name, x, dims, shape)
    if x.shape[-3] != count:
        raise ValueError(f"{name} must have the shape {shape}, got {tuple(x.shape)}.")
    return x.unbind(-3)


def _check_rows(name: str, x: object, least: int, shape: str) -> None:
    if not isinstance(x, Tensor) or x.dim() < least:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor of shape {shape}, got {got}.")


def _check_mask(name: str, mask: object, hidden_states: Tensor) -> None:
    """Of the batch and length of the hidden states, on their device; not of an empty batch."""
    shape = tuple(hidden_states.shape[:2])
    check_dim(name, mask, 2, f"(batch, length) = {shape}")
    assert isinstance(mask, Tensor)
    if tuple(mask.shape) != shape or mask.device != hidden_states.device:
        raise ValueError(
            f"{name} must have the batch and length of hidden_states, {shape} on {hidden_states.device}; "
            f"got {tuple(mask.shape)} on {mask.device}."
        )
    if shape[0] == 0:
        raise ValueError("hidden_states must have a batch of at least 1, got 0: there is no longest sequence.")
