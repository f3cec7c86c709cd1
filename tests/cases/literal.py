"""Flash Attention as a literal double loop in torch, one operation after the other: the specification.

Every operation on bf16 or fp16 tensors computes in FP32 and rounds its result; matrix products add up in FP32.
It is slow on purpose: nothing here is clever.
"""

from __future__ import annotations

import math

import torch


def sees(masked: bool, queries: int, keys: int, i: int, j: int) -> bool:
    """Whether query i sees key j under a bottom-right aligned causal mask."""
    return not masked or j <= i + keys - queries


def _tile_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    causal: bool,
    start: tuple[int, int],
    total: tuple[int, int],
) -> torch.Tensor:
    s = (q @ k.T) * scale
    if causal:
        for i in range(s.shape[0]):
            for j in range(s.shape[1]):
                if not sees(True, *total, start[0] + i, start[1] + j):
                    s[i, j] = -math.inf
    return s


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least FP32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _finite(m: torch.Tensor) -> torch.Tensor:
    return torch.where(m == -math.inf, torch.zeros_like(m), m)


def fa1(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: tuple[int, int], causal: bool = False
) -> torch.Tensor:
    """Algorithm 1 of FlashAttention on (N, D): outer loop over K/V, the output normalised at every step."""
    (n, d), keys = q.shape, k.shape[0]
    o = torch.zeros(n, v.shape[1], dtype=q.dtype)
    row_sum = torch.zeros(n, 1, dtype=q.dtype)
    maximum = torch.full((n, 1), -math.inf, dtype=q.dtype)
    for j in range(0, keys, block[1]):
        for i in range(0, n, block[0]):
            rows = slice(i, min(i + block[0], n))
            if causal and not sees(True, n, keys, rows.stop - 1, j):
                continue  # the whole tile is hidden
            s = _tile_scores(q[rows], k[j : j + block[1]], d**-0.5, causal, (i, j), (n, keys))
            local = s.amax(-1, keepdim=True)
            p = torch.exp(s - _finite(local))
            local_sum = p.sum(-1, keepdim=True)
            new = torch.maximum(maximum[rows], local)
            before, now = torch.exp(maximum[rows] - _finite(new)), torch.exp(local - _finite(new))
            new_sum = row_sum[rows] * before + now * local_sum
            product = p @ v[j : j + block[1]]
            safe = torch.where(new_sum == 0, torch.ones_like(new_sum), new_sum)
            o[rows] = ((row_sum[rows] * before) * o[rows] + now * product) / safe
            row_sum[rows], maximum[rows] = new_sum, new
    return o


def fa2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: tuple[int, int], causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 of FlashAttention-2: outer loop over Q, one normalisation; the output and the log-sum-exp."""
    (n, d), keys = q.shape, k.shape[0]
    o = torch.zeros(n, v.shape[1], dtype=q.dtype)
    lse = torch.zeros(n, 1, dtype=q.dtype)
    for i in range(0, n, block[0]):
        rows = slice(i, min(i + block[0], n))
        acc = torch.zeros_like(o[rows])
        row_sum = torch.zeros_like(lse[rows])
        maximum = torch.full_like(row_sum, -math.inf)
        for j in range(0, keys, block[1]):
            s = _tile_scores(q[rows], k[j : j + block[1]], d**-0.5, causal, (i, j), (n, keys))
            new = torch.maximum(maximum, s.amax(-1, keepdim=True))
            p = torch.exp(s - _finite(new))
            before = torch.exp(maximum - _finite(new))
            row_sum = row_sum * before + p.sum(-1, keepdim=True)
            acc = acc * before + p @ v[j : j + block[1]]
            maximum = new
        o[rows] = acc / torch.where(row_sum == 0, torch.ones_like(row_sum), row_sum)
        # At least in FP32 and rounded once: the log-sum-exp is one step.
        lse[rows] = (wide(maximum) + wide(row_sum).log()).to(q.dtype)
    return o, lse


def fa2_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    block: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 2 of FlashAttention-2 in full: outer loop over K/V; sums are added in FP32 and rounded once."""
    n, d = q.shape
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (wide(grad) * wide(o)).sum(-1, keepdim=True).to(q.dtype)
    for j in range(0, k.shape[0], block[1]):
        cols = slice(j, min(j + block[1], k.shape[0]))
        for i in range(0, n, block[0]):
            rows = slice(i, min(i + block[0], n))
            p = torch.exp((q[rows] @ k[cols].T) * d**-0.5 - lse[rows])
            dv[cols] = (wide(dv[cols]) + wide(p).T @ wide(grad[rows])).to(q.dtype)
            dp = grad[rows] @ v[cols].T
            ds = p * (dp - delta[rows])
            dq[rows] = (wide(dq[rows]) + wide(ds) @ wide(k[cols])).to(q.dtype)
            dk[cols] = (wide(dk[cols]) + wide(ds).T @ wide(q[rows])).to(q.dtype)
    return dq * d**-0.5, dk * d**-0.5, dv
