"""The backward pass of tiled attention: P is computed again from the scores and the log-sum-exp."""

from __future__ import annotations

import torch

from assay.cases.attention.fused import fused_kernels
from assay.cases.attention.problem import LOG2_E, Piece, Problem, without_minus_infinity
from assay.formats.spec import Format

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def backward(problem: Problem, output: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor) -> Gradients:
    """dQ, dK and dV with flattened heads, in the plan's output format.

    `output` and `grad` are (heads, rows, Dv), `lse` is (heads, rows), as `forward` left them.
    """
    plan, arithmetic = problem.plan, problem.arithmetic
    grad = arithmetic.hold(grad, plan.inputs)
    # As in forward: what a NaN or inf reaches in dense attention, it reaches here, also through P = 0.
    problem.skips = problem.skips and all(bool(torch.isfinite(x).all()) for x in (problem.q, problem.k, grad))
    carrier = arithmetic.carrier
    delta = arithmetic.hold((grad.to(carrier) * output.to(carrier)).sum(-1), plan.delta)
    fused = fused_kernels(problem)
    if fused is not None:
        dq, own_dk, own_dv = fused[1].gradients(problem, lse, delta, grad)
    else:
        dq, own_dk, own_dv = _by_pieces(problem, lse, delta, grad)
    scale = 1.0 if problem.tiling.scale_inside else problem.scale
    dq = arithmetic.apply(plan.output, torch.mul, dq, scale)
    dk = arithmetic.apply(plan.output, torch.mul, _sum_groups(problem, own_dk, plan.dk), scale)
    return dq, dk, arithmetic.hold(_sum_groups(problem, own_dv, plan.dv), plan.output)


def _sum_groups(problem: Problem, own: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Each query head summed up its own dK or dV; add those that share a key/value head, as kernels do."""
    arithmetic = problem.arithmetic
    members = own.unflatten(0, (-1, problem.group)).unbind(1)
    total = arithmetic.hold(members[0], fmt)
    for member in members[1:]:
        total = arithmetic.apply(fmt, torch.add, total, arithmetic.hold(member, fmt))
    return total


def _by_pieces(problem: Problem, lse: torch.Tensor, delta: torch.Tensor, grad: torch.Tensor) -> Gradients:
    """Unscaled dQ, and each query head's own dK and dV."""
    heads, carrier = problem.q.shape[0], problem.arithmetic.carrier
    dq = torch.zeros_like(problem.q, dtype=carrier)
    dk = problem.k.new_zeros(heads, *problem.k.shape[1:], dtype=carrier)
    dv = problem.v.new_zeros(heads, *problem.v.shape[1:], dtype=carrier)
    dk, dv = problem.arithmetic.hold(dk, problem.plan.dk), problem.arithmetic.hold(dv, problem.plan.dv)
    for piece in problem.pieces():
        chosen = slice(piece.heads.start, piece.heads.stop)
        part = _piece(problem, piece, (dk[chosen], dv[chosen]), lse, delta, grad)
        dq[chosen, piece.rows] = part.transpose(1, 2).to(carrier)
    return dq, dk, dv


def _piece(
    problem: Problem,
    piece: Piece,
    own: tuple[torch.Tensor, torch.Tensor],
    lse: torch.Tensor,
    delta: torch.Tensor,
    grad: torch.Tensor,
) -> torch.Tensor:
    """Add a piece's rows to its heads' dK and dV (in place) and return its dQᵀ, unscaled."""
    plan, arithmetic, tiling = problem.plan, problem.arithmetic, problem.tiling
    heads = slice(piece.heads.start, piece.heads.stop)
    q, go = problem.q[heads, piece.rows], grad[heads, piece.rows]
    reference = without_minus_infinity(lse[heads, None, piece.rows])
    if tiling.exp2:
        reference = arithmetic.apply(plan.log_sum_exp, torch.mul, reference, LOG2_E)
    dq = arithmetic.hold(torch.zeros_like(q, dtype=arithmetic.carrier).transpose(1, 2), plan.dq)
    for start, columns, blocks in problem.tiles(piece):
        cols = slice(start, start + blocks * columns)
        s = problem.scores(piece, cols)  # (heads, keys, rows)
        x = arithmetic.apply(plan.exponential, torch.sub, s, reference, out=s)
        p = arithmetic.apply(plan.exponential, torch.exp2 if tiling.exp2 else torch.exp, x, out=x)
        v = problem.of_kv_heads(problem.v, piece.heads)[:, cols]
        dp = arithmetic.dot(v, go.transpose(1, 2), plan.dprobabilities)
        dp = arithmetic.apply(plan.delta, torch.sub, dp, delta[heads, None, piece.rows], out=dp)
        ds = arithmetic.apply(plan.dscores, torch.mul, arithmetic.hold(p, plan.recomputed), dp)
        row_block = tiling.block[0]
        _add_dot(problem, plan.dv, own[1][:, cols], arithmetic.hold(p, plan.probabilities), go, row_block)
        scale = problem.scale if tiling.scale_inside else 1.0
        _add_dot(problem, plan.dk, own[0][:, cols], ds, q, row_block, scale)
        k = problem.of_kv_heads(problem.k, piece.heads)[:, cols]
        _add_dot(problem, plan.dq, dq, k.transpose(1, 2), ds, columns, scale)
    return dq


def _add_dot(
    problem: Problem, fmt: Format, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, block: int, scale: float = 1.0
) -> None:
    """total += a·b·scale, rounded to `fmt` after every `block` of the summed dimension."""
    arithmetic, plan = problem.arithmetic, problem.plan
    if total.dtype == arithmetic.carrier and fmt == plan.accumulator != plan.output:
        block = a.shape[-1]  # sums in FP32 that leave in fewer bits: where they are cut does not show
    for start in range(0, a.shape[-1], block):
        part = slice(start, start + block)
        product = arithmetic.dot(a[..., part], b[..., part, :], plan.accumulator)
        if scale != 1:
            product = arithmetic.apply(plan.accumulator, torch.mul, product, scale, out=product)
        total.copy_(arithmetic.apply(fmt, torch.add, total, product))
