"""Baseline attention: scores, softmax and P·V as whole matrices, every step rounded as a plan says.

SDPA's MATH backend upcasts to FP32 inside; this does not: in bf16 it is what plain bf16 attention is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from assay.cases.attention.arithmetic import Arithmetic, exactly, result_dtype
from assay.cases.attention.checks import check_call, check_plan, check_scale, refuse_double_backward
from assay.cases.attention.masking import Masking, Window
from assay.cases.attention.plan import Plan

_SCORES_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 27}  # elements of S held at a time


def baseline_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: Plan,
    causal: bool = False,
    window: Window | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(Q·Kᵀ·scale + bias)·V with every step rounded, for q (B, H, Nq, D), k and v (B, Hkv, Nk, D).

    The arguments mean what they mean in `tiled_attention`. Computed a few rows at a time, which changes no bit:
    a row's softmax needs only that row. Gradients follow the same plan and keep nothing but the inputs.
    """
    check_plan(plan)
    masking = check_call(q, k, v, causal=causal, window=window, bias=bias, alibi_slopes=alibi_slopes)
    out: torch.Tensor = _BaselineAttention.apply(q, k, v, plan, masking, check_scale(scale, q.shape[-1]))
    return out


class _Rows:
    """Scores and probabilities of some rows of one head, rounded."""

    def __init__(self, plan: Plan, masking: Masking, scale: float) -> None:
        self.plan, self.masking, self.scale = plan, masking, scale
        self.arithmetic = Arithmetic(plan)

    def probabilities(self, q: torch.Tensor, k: torch.Tensor, head: tuple[int, int], rows: slice) -> torch.Tensor:
        """P, normalised, in the format of the normalisation."""
        plan, arithmetic = self.plan, self.arithmetic
        s = arithmetic.dot(q, k.T, plan.scores)
        s = arithmetic.apply(plan.scale, torch.mul, s, self.scale, out=s)
        s = self._masked(s, head, rows)
        maximum = arithmetic.hold(s.amax(-1, keepdim=True), plan.maximum)
        # A row that sees no key has the maximum −inf; subtracting 0 instead gives P = 0 rather than NaN.
        maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
        x = arithmetic.apply(plan.exponential, torch.sub, s, maximum, out=s)
        p = arithmetic.apply(plan.exponential, torch.exp, x, out=x)
        total = arithmetic.sum(p, -1, plan.row_sum)[:, None]
        return arithmetic.apply(plan.normalization, torch.div, p, total.masked_fill(total == 0, 1.0))

    def _masked(self, s: torch.Tensor, head: tuple[int, int], rows: slice) -> torch.Tensor:
        masking, carrier = self.masking, self.arithmetic.carrier
        cols = slice(0, masking.keys)
        if masking.alibi_slopes is not None:
            slope = masking.alibi_slopes[head].double()
            added = (-slope * masking.distances(rows, cols, s.device)).to(carrier)
            s = self.arithmetic.apply(self.plan.scale, torch.add, s, added)
        if masking.bias is not None:
            bias = masking.bias[head][rows]
            if bias.dtype == torch.bool:
                s = s.masked_fill(~bias, -torch.inf)
            else:
                s = self.arithmetic.apply(self.plan.scale, torch.add, s, bias.to(carrier))
        hidden = masking.hidden(rows, cols, s.device)
        return s if hidden is None else s.masked_fill(hidden, -torch.inf)


def _row_chunks(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, int, int, slice]]:
    batch, heads, queries, _ = q.shape
    step = max(1, _SCORES_AT_ONCE["cuda" if q.is_cuda else "cpu"] // k.shape[2])
    for b in range(batch):
        for h in range(heads):
            for start in range(0, queries, step):
                yield b, h, h * k.shape[1] // heads, slice(start, min(start + step, queries))


class _BaselineAttention(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Plan,
        masking: Masking,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        dtype = result_dtype(q.dtype, plan)
        ctx.rows = rows_of = _Rows(plan, masking, scale)
        arithmetic = rows_of.arithmetic
        q, k, v = (arithmetic.hold(x, plan.inputs) for x in (q, k, v))
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=arithmetic.carrier, device=q.device)
        for b, h, kv, rows in _row_chunks(q, k):
            p = rows_of.probabilities(q[b, h, rows], k[b, kv], (b, h), rows)
            p = arithmetic.hold(p, plan.probabilities)
            product = arithmetic.dot(p, v[b, kv], plan.output_accumulator)
            out[b, h, rows] = arithmetic.hold(product, plan.output).to(out.dtype)
        return out.to(dtype)

    @staticmethod
    @exactly
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_double_backward()
        rows_of: _Rows = ctx.rows
        plan, arithmetic = rows_of.plan, rows_of.arithmetic
        q, k, v, grad = (arithmetic.hold(x, plan.inputs) for x in (*ctx.saved_tensors, grad))
        dq = torch.zeros_like(q, dtype=arithmetic.carrier)
        dk = arithmetic.hold(torch.zeros_like(k, dtype=arithmetic.carrier), plan.dk)
        dv = arithmetic.hold(torch.zeros_like(v, dtype=arithmetic.carrier), plan.dv)
        for b, h, kv, rows in _row_chunks(q, k):
            p = rows_of.probabilities(q[b, h, rows], k[b, kv], (b, h), rows)
            g = grad[b, h, rows]
            dp = arithmetic.dot(g, v[b, kv].T, plan.dprobabilities)
            weighed = p.to(arithmetic.carrier) * dp.to(arithmetic.carrier)
            delta = arithmetic.hold(weighed.sum(-1, keepdim=True), plan.delta)
            dp = arithmetic.apply(plan.delta, torch.sub, dp, delta)
            ds = arithmetic.apply(plan.dscores, torch.mul, arithmetic.hold(p, plan.recomputed), dp)
            dq[b, h, rows] = arithmetic.dot(ds, k[b, kv], plan.dq).to(dq.dtype)
            product = arithmetic.dot(ds.T, q[b, h, rows], plan.dk)
            dk[b, kv] = arithmetic.apply(plan.dk, torch.add, dk[b, kv], product)
            product = arithmetic.dot(arithmetic.hold(p, plan.probabilities).T, g, plan.dv)
            dv[b, kv] = arithmetic.apply(plan.dv, torch.add, dv[b, kv], product)
        dq = arithmetic.apply(plan.output, torch.mul, dq, rows_of.scale)
        dk = arithmetic.apply(plan.output, torch.mul, dk, rows_of.scale)
        dv = arithmetic.hold(dv, plan.output)
        shaped = (g.to(x.dtype) for g, x in zip((dq, dk, dv), ctx.saved_tensors, strict=True))
        return *shaped, None, None, None
