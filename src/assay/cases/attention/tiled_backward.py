"""The backward pass of tiled attention: P is computed again from the scores and the log-sum-exp."""

from __future__ import annotations

import torch

from assay.cases.attention.problem import LOG2_E, Piece, Problem, without_minus_infinity
from assay.formats.spec import Format

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def backward(problem: Problem, output: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor) -> Gradients:
    """dQ, dK and dV with flattened heads, in the plan's output format.

    `output` and `grad` are (heads, rows, Dv), `lse` is (heads, rows), as `forward` left them.
    """
    plan, arithmetic = problem.plan, problem.arithmetic
    grad = arithmetic.hold(grad, plan.inputs)
    carrier = arithmetic.carrier
    delta = arithmetic.hold((grad.to(carrier) * output.to(carrier)).sum(-1), plan.delta)
    dq = torch.zeros_like(problem.q, dtype=carrier)
    dk = arithmetic.hold(torch.zeros_like(problem.k, dtype=carrier), plan.dk)
    dv = arithmetic.hold(torch.zeros_like(problem.v, dtype=carrier), plan.dv)
    # Each query head sums up its own dK and dV; the heads of a group are added afterwards, as kernels do.
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for piece in problem.pieces():
        own = sums.setdefault(piece.heads.start, _own_sums(problem, piece))
        dq[piece.heads.start : piece.heads.stop, piece.rows] = _piece(
            problem, piece, own, lse, delta, grad
        ).transpose(1, 2)
        if piece.rows.stop == problem.masking.queries:
            del sums[piece.heads.start]
            for i, head in enumerate(piece.heads):
                kv = head // problem.group
                dk[kv] = arithmetic.apply(plan.dk, torch.add, dk[kv], own[0][i])
                dv[kv] = arithmetic.apply(plan.dv, torch.add, dv[kv], own[1][i])
    dq = arithmetic.apply(plan.output, torch.mul, dq, problem.scale)
    dk = arithmetic.apply(plan.output, torch.mul, dk, problem.scale)
    return dq, dk, arithmetic.hold(dv, plan.output)


def _own_sums(problem: Problem, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    plan, arithmetic = problem.plan, problem.arithmetic
    dk = problem.k.new_zeros(len(piece.heads), *problem.k.shape[1:], dtype=arithmetic.carrier)
    dv = problem.v.new_zeros(len(piece.heads), *problem.v.shape[1:], dtype=arithmetic.carrier)
    return arithmetic.hold(dk, plan.dk), arithmetic.hold(dv, plan.dv)


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
        dp = arithmetic.apply(plan.dprobabilities, torch.sub, dp, delta[heads, None, piece.rows], out=dp)
        ds = arithmetic.apply(plan.dscores, torch.mul, p, dp)
        row_block = tiling.block[0]
        _add_dot(problem, plan.dv, own[1][:, cols], arithmetic.hold(p, plan.probabilities), go, row_block)
        _add_dot(problem, plan.dk, own[0][:, cols], ds, q, row_block)
        k = problem.of_kv_heads(problem.k, piece.heads)[:, cols]
        _add_dot(problem, plan.dq, dq, k.transpose(1, 2), ds, columns)
    return dq


def _add_dot(
    problem: Problem, fmt: Format, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, block: int
) -> None:
    """total += a·b, rounded to `fmt` after every `block` of the summed dimension."""
    arithmetic = problem.arithmetic
    if total.dtype == arithmetic.carrier and fmt == problem.plan.accumulator:
        block = a.shape[-1]  # the running sum is as wide as the dot product's own: one product does
    for start in range(0, a.shape[-1], block):
        part = slice(start, start + block)
        product = arithmetic.dot(a[..., part], b[..., part, :], problem.plan.accumulator)
        total.copy_(arithmetic.apply(fmt, torch.add, total, product))
