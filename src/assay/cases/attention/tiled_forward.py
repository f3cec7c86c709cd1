"""The forward pass of tiled attention: online softmax in the orders of FA1, FA2 and split-KV."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from assay.cases.attention.fused import fused_kernels
from assay.cases.attention.problem import Piece, Problem, without_minus_infinity

OverKeys = Callable[[tuple[int, int]], tuple[torch.Tensor, torch.Tensor]]
"""Online softmax over the i-th of n parts of the keys: the normalised output and the log-sum-exp."""


@dataclass(slots=True)
class State:
    """What online softmax carries from block to block, for (heads, rows)."""

    maximum: torch.Tensor
    row_sum: torch.Tensor
    output: torch.Tensor  # (heads, Dv, rows)


def forward(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (heads, rows, Dv) in the plan's output format, and the log-sum-exp (heads, rows)."""
    fused = fused_kernels(problem)
    if fused is not None:
        output, sums = _attend(problem, partial(fused[0].over_keys, problem))
        return output.transpose(1, 2), sums
    outputs, all_sums = [], []
    by_heads: dict[int, list[Piece]] = {}
    for piece in problem.pieces():
        by_heads.setdefault(piece.heads.start, []).append(piece)
    for pieces in by_heads.values():
        results = [_attend(problem, partial(_over_keys, problem, piece)) for piece in pieces]
        outputs.append(torch.cat([out for out, _ in results], dim=2).transpose(1, 2))
        all_sums.append(torch.cat([lse for _, lse in results], dim=1))
    return torch.cat(outputs), torch.cat(all_sums)


def _attend(problem: Problem, over_keys: OverKeys) -> tuple[torch.Tensor, torch.Tensor]:
    plan, arithmetic = problem.plan, problem.arithmetic
    if problem.tiling.order != "split_kv":
        output, lse = over_keys((0, 1))
    else:
        splits = problem.tiling.splits
        output, lse = _merge(problem, [over_keys((i, splits)) for i in range(splits)])
    return arithmetic.hold(output, plan.output), lse


def _over_keys(problem: Problem, piece: Piece, part: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Online softmax over (a part of) the keys: the normalised output and the log-sum-exp."""
    state = _empty(problem, piece)
    tiles = list(problem.tiles(piece, part))
    for start, columns, blocks in reversed(tiles) if problem.tiling.reverse_keys else tiles:
        _absorb(problem, state, piece, start, columns, blocks)
    return _finish(problem, state)


def _empty(problem: Problem, piece: Piece) -> State:
    plan, arithmetic = problem.plan, problem.arithmetic
    heads, rows = len(piece.heads), piece.rows.stop - piece.rows.start
    zeros = torch.zeros(heads, problem.v.shape[-1], rows, device=problem.q.device, dtype=arithmetic.carrier)
    return State(
        maximum=arithmetic.hold(zeros[:, 0] - torch.inf, plan.maximum),
        row_sum=arithmetic.hold(zeros[:, 0], plan.row_sum),
        output=arithmetic.hold(zeros, plan.output_accumulator),
    )


def _absorb(problem: Problem, state: State, piece: Piece, start: int, columns: int, blocks: int) -> None:
    """Take in a run of blocks: their exponentials and products in bulk, then the recurrence block by block."""
    plan, arithmetic, tiling = problem.plan, problem.arithmetic, problem.tiling
    exp = torch.exp2 if tiling.exp2 else torch.exp
    cols = slice(start, start + blocks * columns)
    s = _in_order(
        problem, problem.scores(piece, cols).unflatten(1, (blocks, columns))
    )  # (heads, blocks, columns, rows)

    local = _block_maximum(problem, s)  # (heads, blocks, rows)
    running = _running_maximum(problem, state.maximum, local)
    before = torch.cat((state.maximum[:, None], running[:, :-1]), dim=1)
    reference = without_minus_infinity(local if tiling.order == "fa1" else running)

    x = arithmetic.apply(plan.exponential, torch.sub, s, reference[:, :, None], out=s)
    p = arithmetic.apply(plan.exponential, exp, x, out=x)
    if tiling.probability_shift:
        p = arithmetic.apply(plan.exponential, torch.mul, p, 2.0**tiling.probability_shift)
    p_cast = arithmetic.hold(p, plan.probabilities)
    sums = arithmetic.sum(p_cast if tiling.sum_after_cast else p, 2, plan.row_sum)
    products = _times_v(problem, piece, cols, p_cast)  # (heads, blocks, Dv, rows)

    latest = without_minus_infinity(running)
    factor = arithmetic.apply(plan.rescale, torch.sub, before, latest)
    factor = arithmetic.apply(plan.rescale, exp, factor)
    if tiling.order == "fa1":
        weight = arithmetic.apply(plan.rescale, torch.sub, local, latest)
        weight = arithmetic.apply(plan.rescale, exp, weight)
        sums = arithmetic.apply(plan.row_sum, torch.mul, sums, weight)
        products = arithmetic.apply(plan.output_accumulator, torch.mul, products, weight[:, :, None], out=products)
        _recur_fa1(problem, state, factor, sums, products)
    else:
        _recur_fa2(problem, state, factor, sums, products)
    state.maximum = running[:, -1]


def _in_order(problem: Problem, blocks: torch.Tensor) -> torch.Tensor:
    """(heads, blocks, …): the blocks of a run in the order in which they are taken in."""
    return blocks.flip(1) if problem.tiling.reverse_keys else blocks


def _block_maximum(problem: Problem, s: torch.Tensor) -> torch.Tensor:
    arithmetic, beta = problem.arithmetic, problem.tiling.tie_shift
    top = s.amax(2)
    maximum = arithmetic.hold(top, problem.plan.maximum)
    if beta is None:
        return maximum
    tied = ((s == top[:, :, None]).sum(2) > 1) & (maximum > -torch.inf)
    shifted = arithmetic.hold(torch.where(maximum > 0, maximum * beta, 0.0), problem.plan.maximum)
    return torch.where(tied & (maximum != 0), shifted, maximum)


def _running_maximum(problem: Problem, maximum: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The maximum that each block's exponentials refer to once it is taken in."""
    threshold = problem.tiling.lazy_threshold
    if threshold is None:
        return torch.cummax(torch.cat((maximum[:, None], local), dim=1), dim=1).values[:, 1:]
    stale = []
    for block in local.unbind(1):
        higher = torch.maximum(maximum, block)
        grown = higher.double() - maximum.double()
        maximum = torch.where((grown > threshold) | higher.isnan(), higher, maximum)
        stale.append(maximum)
    return torch.stack(stale, dim=1)


def _times_v(problem: Problem, piece: Piece, cols: slice, p: torch.Tensor) -> torch.Tensor:
    """Each block's (P·V)ᵀ in the output accumulator's format."""
    plan, arithmetic = problem.plan, problem.arithmetic
    v = _in_order(problem, problem.of_kv_heads(problem.v, piece.heads)[:, cols].unflatten(1, p.shape[1:3]))
    products = arithmetic.dot(v.transpose(2, 3), p, plan.output_accumulator)
    if problem.v_scale is None:
        return products
    scale = problem.of_kv_heads(problem.v_scale, piece.heads)[:, cols].unflatten(1, p.shape[1:3])
    scale = _in_order(problem, scale)
    return arithmetic.apply(plan.output_accumulator, torch.mul, products, scale[:, :, :1])


def _recur_fa1(
    problem: Problem, state: State, factor: torch.Tensor, sums: torch.Tensor, products: torch.Tensor
) -> None:
    """O ← (l·factor·O + products) / l_new, normalised at every block."""
    plan, arithmetic = problem.plan, problem.arithmetic
    accumulator = plan.output_accumulator
    for block in range(factor.shape[1]):
        carried = arithmetic.apply(plan.rescale, torch.mul, state.row_sum, factor[:, block])
        # The sum uses the product in its own format: with one format for all, these two are the same value.
        summand = arithmetic.apply(plan.row_sum, torch.mul, state.row_sum, factor[:, block])
        state.row_sum = arithmetic.apply(plan.row_sum, torch.add, summand, sums[:, block])
        total = state.row_sum.masked_fill(state.row_sum == 0, 1.0)
        out = state.output
        out = arithmetic.apply(accumulator, torch.mul, out, carried[:, None], out=out)
        out = arithmetic.apply(accumulator, torch.add, out, products[:, block], out=out)
        out = arithmetic.apply(plan.normalization, torch.div, out, total[:, None], out=out)
        state.output = arithmetic.hold(out, accumulator)


def _recur_fa2(
    problem: Problem, state: State, factor: torch.Tensor, sums: torch.Tensor, products: torch.Tensor
) -> None:
    """O ← factor·O + products, to be normalised at the end."""
    plan, arithmetic = problem.plan, problem.arithmetic
    accumulator = plan.output_accumulator
    for block in range(factor.shape[1]):
        rescaled = arithmetic.apply(plan.row_sum, torch.mul, state.row_sum, factor[:, block])
        state.row_sum = arithmetic.apply(plan.row_sum, torch.add, rescaled, sums[:, block])
        out = state.output
        out = arithmetic.apply(accumulator, torch.mul, out, factor[:, None, block], out=out)
        state.output = arithmetic.apply(accumulator, torch.add, out, products[:, block], out=out)


def _finish(problem: Problem, state: State) -> tuple[torch.Tensor, torch.Tensor]:
    plan, arithmetic, tiling = problem.plan, problem.arithmetic, problem.tiling
    output = state.output
    if tiling.order != "fa1":
        total = state.row_sum.masked_fill(state.row_sum == 0, 1.0)
        output = arithmetic.apply(plan.normalization, torch.div, output, total[:, None])
    unit = math.log(2) if tiling.exp2 else 1.0
    log = state.row_sum.to(arithmetic.carrier).log() - tiling.probability_shift * math.log(2)
    lse = arithmetic.hold(state.maximum.to(arithmetic.carrier) * unit + log, plan.log_sum_exp)
    return output, lse


def _merge(problem: Problem, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh the parts of split-KV by their share of the row sum and add them up."""
    plan, arithmetic = problem.plan, problem.arithmetic
    maximum = torch.stack([lse for _, lse in parts]).amax(0)
    reference = without_minus_infinity(maximum)
    output: torch.Tensor | None = None
    total: torch.Tensor | None = None
    for part, lse in parts:
        weight = arithmetic.apply(plan.rescale, torch.sub, lse, reference)
        weight = arithmetic.apply(plan.rescale, torch.exp, weight)
        weighed = arithmetic.apply(plan.output_accumulator, torch.mul, part, weight[:, None])
        held = arithmetic.hold(weight, plan.row_sum)
        total = held if total is None else arithmetic.apply(plan.row_sum, torch.add, total, held)
        output = weighed if output is None else arithmetic.apply(plan.output_accumulator, torch.add, output, weighed)
    assert output is not None
    assert total is not None
    divisor = total.masked_fill(total == 0, 1.0)
    output = arithmetic.apply(plan.normalization, torch.div, output, divisor[:, None])
    log = total.to(arithmetic.carrier).log()
    return output, arithmetic.hold(maximum.to(arithmetic.carrier) + log, plan.log_sum_exp)
