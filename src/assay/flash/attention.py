"""`flash_attention`: attention that people use. Checks, then one operator."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from assay.flash import batching as _batching  # noqa: F401  (teaches the operator vmap)
from assay.flash import checks, cpu_plain, cpu_quick
from assay.flash import fp8 as eight_bits
from assay.flash.fp8 import FP8
from assay.flash.numerics import Numerics
from assay.flash.ops import attention
from assay.flash.rotary import Rotary, rotate


@overload
def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Any) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
def flash_attention(  # type: ignore[misc]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: checks.Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    rotary: Rotary | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    allow_tf32: bool = False,
    numerics: Numerics | None = None,
    fp8: FP8 | bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention in O(N) memory, forward and backward.

    `softmax(scale · q·kᵀ) · v` over the keys that each query sees. Scores, sums and the output are kept in FP32; P is
    cast to the dtype of v for its product with v.

    Args:
        q: (batch, heads, queries, D), any strides. D from 1 to 256.
        k: (batch, KV heads, keys, D). Heads may be a multiple of KV heads: query head h takes h // (heads / KV heads).
        v: (batch, KV heads, keys, D_v).
        causal: Hide later keys. The last query stands beside the last key (bottom-right, as in flash-attention; the
            drop-in for torch's SDPA aligns top-left, as torch does).
        scale: Of the scores; None: 1/√D.
        window: (left, right): keys at most so far before and after a query's position; None: no limit on that side.
        softcap: Scores become softcap · tanh(scores / softcap).
        alibi_slopes: (heads,) or (batch, heads): −slope · distance is added to the scores.
        sinks: (heads,): the logit of one more key without a value, seen by every query. Has a gradient.
        bias: Broadcast to (batch, heads, queries, keys): float, added to the scores, with a gradient; or bool, where
            False hides.
        rotary: `Rotary(cos, sin)`: q and k are rotated first, by position.
        dropout_p: The share of probabilities that is dropped.
        dropout_seed: Makes dropout repeatable, the same on CPU and CUDA; None: drawn from torch's generator (on the CPU
            a short call's whole mask).
        cu_seqlens_q: (sequences + 1,): the inputs hold sequences one after the other, (1, heads, all lengths, D), each
            attending within itself; these are their first queries, and the total.
        cu_seqlens_k: The same for the keys; None: as the queries.
        return_lse: Also return the log-sum-exp of every row's scores, (batch, heads, queries), with a gradient.
        deterministic: Gradients have the same bits every time.
        batch_invariant: A sequence's result has the same bits whatever else is in the batch. Excludes dropout.
        allow_tf32: FP32 inputs may be multiplied in TF32; else in full FP32.
        numerics: What the CUDA kernel rounds, its tiles and its order; None: FP32 inside.
        fp8: True, or an `FP8`: q, k and v are quantised to 8 bits first. On Hopper they are multiplied so, at up to
            twice the rate; elsewhere as the same numbers in more bits. Forward only.

    Rows that see no key give 0, an LSE of −inf and no gradient. Gradients of gradients are refused, but where a short
    call on the CPU is torch's, which has them.
    """
    plain = (
        softcap is None and alibi_slopes is None and sinks is None and rotary is None and cu_seqlens_q is None
        and cu_seqlens_k is None and numerics is None and not return_lse and (fp8 is None or fp8 is False)
    )  # fmt: skip
    flags = type(return_lse) is type(deterministic) is type(batch_invariant) is type(allow_tf32) is bool
    plain = plain and batch_invariant is False
    if plain and flags and type(dropout_p) in (float, int) and dropout_p == 0:
        out = cpu_quick.attention(q, k, v, causal, scale, bias, window=window, last_sees_all=True)
        if out is not None:
            return out
    q, k, v = in_autocast_dtype(q, k, v)
    checks.check_qkv(q, k, v)
    left, right = checks.check_window(window, causal)
    checks.check_flag("return_lse", return_lse)
    deterministic = checks.check_flag("deterministic", deterministic)
    batch_invariant = checks.check_flag("batch_invariant", batch_invariant)
    allow_tf32 = checks.check_flag("allow_tf32", allow_tf32)
    if bias is not None:
        if cu_seqlens_q is not None:
            raise ValueError("bias and cu_seqlens exclude each other: a bias belongs to one grid of queries and keys.")
        bias = checks.check_bias(bias, q, k)
    if plain and dropout_seed is None:
        out = attend_plainly(q, k, v, left, right, scale, bias, dropout_p)
        if out is not None:
            return out
    cu_seqlens_q, cu_seqlens_k = checks.check_packing(cu_seqlens_q, cu_seqlens_k, q)
    sequences = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if alibi_slopes is not None:
        alibi_slopes = checks.check_slopes(alibi_slopes, sequences, q.shape[1], q.device)
    if rotary is not None:
        q, k = rotate(q, k, rotary, cu_seqlens_q, cu_seqlens_k)
    out, lse = attend(
        q,
        k,
        v,
        left=left,
        right=right,
        scale=scale,
        softcap=softcap,
        slopes=alibi_slopes,
        sinks=sinks,
        bias=bias,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        allow_tf32=allow_tf32,
        numerics=numerics,
        fp8=None if fp8 is None or fp8 is False else eight_bits.check_inputs(fp8, q, k, v, sinks, bias),
    )
    return (out, lse) if return_lse else out


def attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int | None,
    right: int | None,
    scale: float | None,
    bias: Tensor | None,
    dropout_p: float,
) -> Tensor | None:
    """The output for checked q, k, v, bias where torch gives what we promise; else None."""
    if q.is_cuda:
        return None
    scale = checked_scale(scale, q)
    dropout_p = checks.check_number("dropout_p", dropout_p, 0, 1)
    if bias is None:
        left, right, bias = cpu_plain.as_mask(q, k, left, right)
    if left is not None:
        return None
    if dropout_p == 0 and cpu_plain.takes(q, k, v, right, scale, bias):
        return cpu_plain.attend(q, k, v, right, scale, bias)
    if cpu_plain.takes_short(q, k, v, right, bias, dropout_p):
        return cpu_plain.attend_short(q, k, v, right, scale, bias, dropout_p)
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int | None,
    right: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    allow_tf32: bool = False,
    numerics: Numerics | None = None,
    fp8: FP8 | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of checked q, k, v, bias; keys are seen from `left` before to `right` after a query's place."""
    scale = checked_scale(scale, q)
    dropout_p = checks.check_number("dropout_p", dropout_p, 0, 1)
    if softcap is not None:
        # 0 is flash-attention's way of saying none
        softcap = checks.check_number("softcap", softcap, 0, float("inf")) or None
    if sinks is not None:
        sinks = checks.check_sinks(sinks, q.shape[1], q.device)
    if numerics is not None and numerics != Numerics() and not q.is_cuda:
        raise ValueError(
            "numerics are knobs of the CUDA kernel; on the CPU assay.tiled_attention with a Plan rounds every step."
        )
    if batch_invariant and dropout_p > 0:
        raise ValueError(
            "batch_invariant and dropout exclude each other: what is dropped depends on a sequence's place in the "
            "batch. Set dropout_p to 0."
        )
    seed = _seed(dropout_seed, q.device) if dropout_p > 0 else None
    dtype = q.dtype
    if fp8 is not None:
        if batch_invariant:
            eight_bits.check_alone(fp8, cu_seqlens_q)
        if eight_bits.takes(q, k, scale, (bias, slopes, cu_seqlens_q, seed, numerics)):
            out, lse = eight_bits.attention_fp8(q, k, v, sinks, scale, left, right, softcap, fp8.encoded())
            return out, lse
        q, k, v = eight_bits.rounded(q, k, v, fp8)
    out, lse = attention(
        q, k, v, bias, slopes, sinks, cu_seqlens_q, cu_seqlens_k, seed, scale, left, right,
        softcap, dropout_p, deterministic, batch_invariant, allow_tf32,
        "" if numerics is None else numerics.encoded(),
    )  # fmt: skip
    return out if out.dtype is dtype else out.to(dtype), lse


def checked_scale(scale: float | None, q: Tensor) -> float:
    """The scale, 1/√D if none is given."""
    if scale is None:
        return float(q.shape[3] ** -0.5)
    return checks.check_number("scale", scale, -float("inf"), float("inf"))


def in_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside autocast, its dtype: as SDPA."""
    if isinstance(q, Tensor) and q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    return q, k, v


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast casts: floats, but not FP64. Anything else is for the checks."""
    castable = isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype != torch.float64
    return x.to(dtype) if castable else x


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """One int64 on the device; drawn from torch's generator there if none is given."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
            got = f"{seed.dtype} {tuple(seed.shape)} on {seed.device}"
            raise ValueError(f"dropout_seed must be one int64 on {device}, got {got}.")
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"dropout_seed must be a whole number of 64 bits, or one int64 on {device}; got {seed!r}.")
    return torch.full((), seed, dtype=torch.int64, device=device)
