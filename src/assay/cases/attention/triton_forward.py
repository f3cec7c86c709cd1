"""The forward pass of `tiled_forward` as one fused Triton kernel: the same steps, the same roundings.

A program takes some rows of one head over all their blocks of keys; scores and exponentials never leave the chip.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from assay.cases.attention.problem import Problem
from assay.cases.attention.triton_steps import (
    exp,
    finite,
    first_key,
    format_constants,
    hold,
    last_key,
    mask_arguments,
    nonzero,
    product_dtype,
    product_precision,
    scores,
)

_OPERANDS = ("inputs", "probabilities")


def over_keys(problem: Problem, part: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`tiled_forward._over_keys` for all heads and rows: the output (heads, Dv, rows) and the log-sum-exp."""
    plan, tiling = problem.plan, problem.tiling
    heads, queries, dim = problem.q.shape
    keys, value_dim = problem.v.shape[1:]
    dtype = product_dtype(plan, *_OPERANDS)
    out = torch.empty(heads, queries, value_dim, dtype=torch.float32, device=problem.q.device)
    lse = torch.empty(heads, queries, dtype=torch.float32, device=problem.q.device)
    blocks = -(-keys // tiling.block[1])
    share = -(-blocks // part[1])
    widest = max(dim, value_dim, tiling.block[1])
    rows = (64 if widest <= 128 else 32) // (2 if dtype == torch.float32 else 1)  # what the registers hold
    with torch.cuda.device_of(problem.q):
        _tiled_forward[(triton.cdiv(queries, rows), heads)](
            problem.q.to(dtype),
            problem.k.to(dtype),
            problem.v.to(dtype),
            out,
            lse,
            begin=part[0] * share,
            end=min(blocks, (part[0] + 1) * share),
            **mask_arguments(problem),
            GROUP=problem.group,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
            BLOCK_VALUE_DIM=max(16, triton.next_power_of_2(value_dim)),
            ROWS=rows,
            ROW_BLOCK=tiling.block[0],
            COLUMNS=tiling.block[1],
            BLOCK_COLUMNS=max(16, triton.next_power_of_2(tiling.block[1])),
            REVERSE=tiling.reverse_keys,
            FA1=tiling.order == "fa1",
            EXP2=tiling.exp2,
            LAZY=tiling.lazy_threshold,
            SUM_AFTER_CAST=tiling.sum_after_cast,
            TIE_SHIFT=tiling.tie_shift,
            SHIFT=tiling.probability_shift,
            SKIPS=problem.skips,
            PRECISION=product_precision(plan, *_OPERANDS),
            **format_constants(
                plan,
                "maximum",
                "exponential",
                "row_sum",
                "rescale",
                "probabilities",
                "output_accumulator",
                "normalization",
                "log_sum_exp",
            ),
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=False,
        )
    return out.transpose(1, 2), lse


@triton.jit
def _tiled_forward(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    out_pointer: tl.tensor,
    lse_pointer: tl.tensor,
    bias_pointer: tl.tensor,
    slopes_pointer: tl.tensor,
    bias_stride_b: tl.tensor,
    bias_stride_h: tl.tensor,
    bias_stride_q: tl.tensor,
    bias_stride_k: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
    FA1: tl.constexpr,
    EXP2: tl.constexpr,
    UNIT: tl.constexpr,
    LAZY: tl.constexpr,
    SUM_AFTER_CAST: tl.constexpr,
    TIE_SHIFT: tl.constexpr,
    SHIFT: tl.constexpr,
    BIAS: tl.constexpr,
    ALIBI: tl.constexpr,
    BANDED: tl.constexpr,
    SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
    F_SCORES: tl.constexpr,
    F_SCALE: tl.constexpr,
    F_MAXIMUM: tl.constexpr,
    F_EXPONENTIAL: tl.constexpr,
    F_ROW_SUM: tl.constexpr,
    F_RESCALE: tl.constexpr,
    F_PROBABILITIES: tl.constexpr,
    F_OUTPUT_ACCUMULATOR: tl.constexpr,
    F_NORMALIZATION: tl.constexpr,
    F_LOG_SUM_EXP: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    columns = tl.arange(0, BLOCK_COLUMNS)
    q_offsets = (head * queries + rows)[:, None] * DIM + dims[None, :]
    q = tl.load(q_pointer + q_offsets, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    k_start = k_pointer + (head // GROUP) * keys * DIM
    v_start = v_pointer + (head // GROUP) * keys * VALUE_DIM

    # The keys that a row of its block of rows sees: a block outside is skipped by all of them.
    block_first = (rows // ROW_BLOCK) * ROW_BLOCK + keys - queries
    block_last = tl.minimum(block_first + ROW_BLOCK, keys) - 1
    seen_first = first_key(block_first, left)
    seen_last = last_key(block_last, right, keys)
    if SKIPS:
        begin = tl.maximum(begin, tl.min(tl.where(inside, seen_first, keys)) // COLUMNS)
        end = tl.minimum(end, tl.cdiv(tl.max(tl.where(inside, seen_last, 0)), COLUMNS))

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, BLOCK_VALUE_DIM), tl.float32)
    for step in range(begin, end):
        block = begin + end - 1 - step if REVERSE else step
        key = block * COLUMNS + columns
        real = (columns < COLUMNS) & (key < keys)
        k_offsets = key[None, :] * DIM + dims[:, None]
        k = tl.load(k_start + k_offsets, mask=real[None, :] & (dims < DIM)[:, None], other=0.0)
        s = scores(
            q,
            k,
            rows,
            key,
            (~real)[None, :],
            head,
            bias_pointer,
            slopes_pointer,
            bias_stride_b,
            bias_stride_h,
            bias_stride_q,
            bias_stride_k,
            queries,
            keys,
            scale,
            left,
            right,
            HEADS,
            UNIT,
            BIAS,
            ALIBI,
            BANDED,
            PRECISION,
            F_SCORES,
            F_SCALE,
        )
        top = tl.max(s, 1)
        local = hold(top, F_MAXIMUM)
        if TIE_SHIFT is not None:
            tied = (tl.sum((s == top[:, None]).to(tl.int32), 1) > 1) & (local > float("-inf"))
            shifted = hold(tl.where(local > 0, local * TIE_SHIFT, 0.0), F_MAXIMUM)
            local = tl.where(tied & (local != 0), shifted, local)
        running = tl.maximum(maximum, local)
        if LAZY is not None:
            running = tl.where(running - maximum > LAZY, running, maximum)
        latest = finite(running)
        reference = finite(local) if FA1 else latest

        p = hold(exp(hold(s - reference[:, None], F_EXPONENTIAL), EXP2), F_EXPONENTIAL)
        if SHIFT != 0:
            p = hold(p * (2.0**SHIFT), F_EXPONENTIAL)
        cast = hold(p, F_PROBABILITIES)
        sums = hold(tl.sum(cast if SUM_AFTER_CAST else p, 1), F_ROW_SUM)
        v_offsets = key[:, None] * VALUE_DIM + value_dims[None, :]
        v = tl.load(v_start + v_offsets, mask=real[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        factor = hold(exp(hold(maximum - latest, F_RESCALE), EXP2), F_RESCALE)
        rescaled = hold(row_sum * factor, F_ROW_SUM)
        if FA1:
            weight = hold(exp(hold(local - latest, F_RESCALE), EXP2), F_RESCALE)
            carried = hold(row_sum * factor, F_RESCALE)
            total = hold(rescaled + hold(sums * weight, F_ROW_SUM), F_ROW_SUM)
            products = hold(tl.dot(cast.to(v.dtype), v, input_precision=PRECISION), F_OUTPUT_ACCUMULATOR)
            updated = hold(output * carried[:, None], F_OUTPUT_ACCUMULATOR)
            weighed = hold(products * weight[:, None], F_OUTPUT_ACCUMULATOR)
            updated = hold(updated + weighed, F_OUTPUT_ACCUMULATOR)
            divisor = tl.broadcast_to(nonzero(total)[:, None], (ROWS, BLOCK_VALUE_DIM))
            updated = hold(tl.math.div_rn(updated, divisor), F_NORMALIZATION)
            updated = hold(updated, F_OUTPUT_ACCUMULATOR)
            # Adding nothing is not nothing in fa1: rows whose block skips this one keep what they had.
            first, last = block * COLUMNS, (block + 1) * COLUMNS
            skipped = (seen_last <= first) | (seen_first >= last) if SKIPS else rows < 0
            output = tl.where(skipped[:, None], output, updated)
            row_sum = tl.where(skipped, row_sum, total)
        else:
            row_sum = hold(rescaled + sums, F_ROW_SUM)
            output = hold(output * factor[:, None], F_OUTPUT_ACCUMULATOR)
            if F_OUTPUT_ACCUMULATOR[0] == 23 and F_OUTPUT_ACCUMULATOR[1] == -126:
                output = tl.dot(cast.to(v.dtype), v, output, input_precision=PRECISION)
            else:
                products = hold(tl.dot(cast.to(v.dtype), v, input_precision=PRECISION), F_OUTPUT_ACCUMULATOR)
                output = hold(output + products, F_OUTPUT_ACCUMULATOR)
        maximum = running

    if not FA1:
        divisor = tl.broadcast_to(nonzero(row_sum)[:, None], (ROWS, BLOCK_VALUE_DIM))
        output = hold(tl.math.div_rn(output, divisor), F_NORMALIZATION)
    log = tl.log(row_sum) - SHIFT * 0.6931471805599453
    lse = hold(maximum * (0.6931471805599453 if EXP2 else 1.0) + log, F_LOG_SUM_EXP)
    out_offsets = (head * queries + rows)[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(out_pointer + out_offsets, output, mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :])
    tl.store(lse_pointer + head * queries + rows, lse, mask=inside)
