"""The golden value: attention in FP64 on the inputs as they are, a few rows at a time.

Nothing here is shared with what it judges but the masks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from assay.cases.attention.checks import check_call, check_gradient, check_scale
from assay.cases.attention.masking import Masking, Window

_SCORES_AT_ONCE = 1 << 22  # elements of S held at a time: 32 MB in FP64


def golden_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(Q·Kᵀ·scale + bias)·V in FP64, for q (B, H, Nq, D), k and v (B, Hkv, Nk, D).

    Rows that see no key give 0. The result carries no gradient: see `golden_gradients`. Round the inputs first
    (`assay.round_to`) to isolate a kernel's arithmetic.
    """
    masking = check_call(q, k, v, causal=causal, window=window, bias=bias, alibi_slopes=alibi_slopes)
    factor = check_scale(scale, q.shape[-1])
    q, k, v = q.detach(), k.detach(), v.detach()  # gradients come from golden_gradients, in bounded memory
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64, device=q.device)
    for b, h, kv, rows in _row_chunks(q, k):
        p = _probabilities(q[b, h, rows], k[b, kv], masking, (b, h), rows, factor)
        out[b, h, rows] = p @ v[b, kv].double()
    return out


def golden_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP64 gradients of `golden_attention` with respect to q, k and v, for the output gradient `grad`."""
    masking = check_call(q, k, v, causal=causal, window=window, bias=bias, alibi_slopes=alibi_slopes)
    factor = check_scale(scale, q.shape[-1])
    check_gradient(grad, (*q.shape[:3], v.shape[-1]), q.device)
    q, k, v, grad = (x.detach() for x in (q, k, v, grad))
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v))
    for b, h, kv, rows in _row_chunks(q, k):
        p = _probabilities(q[b, h, rows], k[b, kv], masking, (b, h), rows, factor)
        g = grad[b, h, rows].double()
        dp = g @ v[b, kv].double().T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * factor
        dq[b, h, rows] = ds @ k[b, kv].double()
        dk[b, kv] += ds.T @ q[b, h, rows].double()
        dv[b, kv] += p.T @ g
    return dq, dk, dv


def _row_chunks(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, int, int, slice]]:
    """(batch, head, key/value head, rows) over all rows, so few at a time that the scores stay small."""
    batch, heads, queries, _ = q.shape
    step = max(1, _SCORES_AT_ONCE // k.shape[2])
    for b in range(batch):
        for h in range(heads):
            for start in range(0, queries, step):
                yield b, h, h * k.shape[1] // heads, slice(start, min(start + step, queries))


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, masking: Masking, head: tuple[int, int], rows: slice, scale: float
) -> torch.Tensor:
    """softmax of the scores of a few rows against all keys; 0 in rows that see none."""
    cols = slice(0, masking.keys)
    scores = (q.double() @ k.double().T) * scale
    if masking.alibi_slopes is not None:
        slope = masking.alibi_slopes[head].double()
        scores -= slope * masking.distances(rows, cols, q.device)
    if masking.bias is not None:
        bias = masking.bias[head][rows]
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.double()
    hidden = masking.hidden(rows, cols, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    maximum = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - maximum.masked_fill(maximum == -torch.inf, 0.0))
    total = p.sum(-1, keepdim=True)
    return p / total.masked_fill(total == 0, 1.0)
