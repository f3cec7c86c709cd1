"""Attention as the formula reads, whole matrices in plain torch operations: the oracle of every test of flash."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

Window = tuple[int | None, int | None]
LINE = (
    min((1 + k / 8) / 2 ** ((k + 1 - 1 / 32) / 8) for k in range(8)),
    max((1 + k / 8) / 2 ** ((k - 1 / 32) / 8) for k in range(8)),
)
"""P of the FP8 kernel over the exponential, at least and at most: a line between powers of two, cut to eighths."""


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    keep: torch.Tensor | Sequence[torch.Tensor] | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, H, Nq, Dv) and the log-sum-exp (B, H, Nq), both differentiable, in the dtype of the inputs.

    Every operation rounds to that dtype: call it with FP64 for the truth, and in a shorter dtype for the error that
    plain attention makes in it. `keep` says which probabilities dropout keeps; packed, one mask for each sequence.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        assert keep is None or isinstance(keep, torch.Tensor)
        return _dense(q, k, v, scale, left, right, softcap, alibi_slopes, sinks, bias, keep, dropout)
    assert bias is None
    outs, sums = [], []
    ends = list(zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True))
    for i, ((q0, k0), (q1, k1)) in enumerate(pairwise(ends)):
        slopes = alibi_slopes
        if slopes is not None and slopes.ndim == 2 and slopes.shape[0] > 1:
            slopes = slopes[i : i + 1]
        mask = None if keep is None else keep[i]
        of = q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1]
        out, lse = _dense(*of, scale, left, right, softcap, slopes, sinks, None, mask, dropout)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


plain_attention = reference_attention
"""The same function, under the name it has when it is called with bf16 or fp16 inputs: every operation rounds."""


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    keep: torch.Tensor | None,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    group, (queries, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    position = torch.arange(queries, device=q.device)[:, None] + (keys - queries)
    ahead = torch.arange(keys, device=q.device) - position
    s = q @ k.mT * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        s = s - slopes.to(s.dtype)[..., None, None] * ahead.abs().to(s.dtype)
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        visible = visible & (ahead >= -left)
    if right is not None:
        visible = visible & (ahead <= right)
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias
    elif bias is not None:
        s = s + bias.to(s.dtype)
    s = s.masked_fill(~visible, -torch.inf)
    p, lse = _softmax(s, sinks)
    if keep is not None:
        p = p * keep.to(p.dtype) / (1 - dropout)
    return p @ v, lse


def _softmax(s: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax over keys (and the sink, which is then left out) and the log of its sum.

    A row of nothing but −inf would give NaN, and NaN gradients: its maximum is taken to be 0 and its sum to be 1.
    """
    if sinks is not None:
        column = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat((s, column), -1)
    if s.shape[-1] == 0:
        return s, s.sum(-1) - torch.inf
    top = s.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    e = (s - top).exp()
    total = e.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    p = e / total
    return p[..., :-1] if sinks is not None else p, lse
