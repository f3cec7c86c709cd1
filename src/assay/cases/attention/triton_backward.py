"""The backward pass of `tiled_backward` as two fused Triton kernels: one for dQ, one for dK and dV.

Each computes the scores and P again; a running gradient is rounded after every block, as the plan says.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from assay.cases.attention.problem import LOG2_E, Problem, without_minus_infinity
from assay.cases.attention.triton_steps import (
    add_product,
    exp,
    first_key,
    format_constants,
    hold,
    last_key,
    mask_arguments,
    product_dtype,
    product_precision,
    scores,
)

_OPERANDS = ("inputs", "probabilities", "dscores")


def gradients(
    problem: Problem, lse: torch.Tensor, delta: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unscaled dQ (heads, rows, D), and each query head's own dK and dV, as values of their formats."""
    plan, tiling = problem.plan, problem.tiling
    heads, queries, dim = problem.q.shape
    keys, value_dim = problem.v.shape[1:]
    dtype = product_dtype(plan, *_OPERANDS)
    reference = without_minus_infinity(lse)
    if tiling.exp2:
        reference = problem.arithmetic.apply(plan.log_sum_exp, torch.mul, reference, LOG2_E)
    q, k, v, go = (x.to(dtype).contiguous() for x in (problem.q, problem.k, problem.v, grad))
    dq, dk, dv = (
        torch.empty(heads, length, width, dtype=torch.float32, device=q.device)
        for length, width in ((queries, dim), (keys, dim), (keys, value_dim))
    )
    tensors = (q, k, v, go, reference.float().contiguous(), delta.float().contiguous())
    constants: dict[str, Any] = {
        **mask_arguments(problem),
        "GROUP": problem.group,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(dim)),
        "BLOCK_VALUE_DIM": max(16, triton.next_power_of_2(value_dim)),
        "EXP2": tiling.exp2,
        "SKIPS": problem.skips,
        "PRECISION": product_precision(plan, *_OPERANDS),
        **format_constants(plan, "exponential", "recomputed", "dprobabilities", "delta", "dscores"),
        "enable_fp_fusion": False,
    }
    tile, constants["num_warps"], constants["num_stages"] = _launch_shape(max(dim, value_dim, *tiling.block), dtype)
    with torch.cuda.device_of(q):
        _tiled_dq[(triton.cdiv(queries, tile), heads)](
            *tensors,
            dq,
            ROWS=tile,
            COLUMNS=tiling.block[1],
            BLOCK_COLUMNS=max(16, triton.next_power_of_2(tiling.block[1])),
            **format_constants(plan, "dq"),
            **constants,
        )
        _tiled_dkv[(triton.cdiv(keys, tile), heads)](
            *tensors,
            dk,
            dv,
            KEYS=tile,
            ROWS=tiling.block[0],
            BLOCK_ROWS=max(16, triton.next_power_of_2(tiling.block[0])),
            **format_constants(plan, "probabilities", "dk", "dv"),
            **constants,
        )
    return dq, dk, dv


def _launch_shape(widest: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows or keys of a program, its warps and the stages of its loop: what the registers and shared memory hold."""
    small = widest <= 128 and dtype != torch.float32
    return (64 if widest <= 128 else 32) // (2 if dtype == torch.float32 else 1), 4, 2 if small else 1


@triton.jit
def _load(
    pointer: tl.tensor,
    row: tl.tensor,
    real: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> tl.tensor:
    """Rows of a (length, WIDTH) matrix; 0 where not `real`."""
    column = tl.arange(0, BLOCK_WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    return tl.load(pointer + offsets, mask=real[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _store(
    pointer: tl.tensor,
    value: tl.tensor,
    row: tl.tensor,
    real: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK_WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(pointer + offsets, value, mask=real[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _p_and_ds(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    go: tl.tensor,
    reference: tl.tensor,
    delta: tl.tensor,
    rows: tl.tensor,
    key: tl.tensor,
    hidden: tl.tensor,
    head: tl.tensor,
    bias_pointer: tl.tensor,
    slopes_pointer: tl.tensor,
    bias_stride_b: tl.tensor,
    bias_stride_h: tl.tensor,
    bias_stride_q: tl.tensor,
    bias_stride_k: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    BIAS: tl.constexpr,
    ALIBI: tl.constexpr,
    BANDED: tl.constexpr,
    PRECISION: tl.constexpr,
    F_SCORES: tl.constexpr,
    F_SCALE: tl.constexpr,
    EXP2: tl.constexpr,
    F_EXPONENTIAL: tl.constexpr,
    F_RECOMPUTED: tl.constexpr,
    F_DPROBABILITIES: tl.constexpr,
    F_DELTA: tl.constexpr,
    F_DSCORES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """P and dS of one tile (rows, keys)."""
    s = scores(
        q,
        tl.trans(k),
        rows,
        key,
        hidden,
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
    p = hold(exp(hold(s - reference[:, None], F_EXPONENTIAL), EXP2), F_EXPONENTIAL)
    dp = hold(tl.dot(go, tl.trans(v), input_precision=PRECISION), F_DPROBABILITIES)
    dp = hold(dp - delta[:, None], F_DELTA)
    return p, hold(hold(p, F_RECOMPUTED) * dp, F_DSCORES)


@triton.jit
def _tiled_dq(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    grad_pointer: tl.tensor,
    reference_pointer: tl.tensor,
    delta_pointer: tl.tensor,
    dq_pointer: tl.tensor,
    bias_pointer: tl.tensor,
    slopes_pointer: tl.tensor,
    bias_stride_b: tl.tensor,
    bias_stride_h: tl.tensor,
    bias_stride_q: tl.tensor,
    bias_stride_k: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    BIAS: tl.constexpr,
    ALIBI: tl.constexpr,
    BANDED: tl.constexpr,
    PRECISION: tl.constexpr,
    F_SCORES: tl.constexpr,
    F_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    EXP2: tl.constexpr,
    SKIPS: tl.constexpr,
    F_EXPONENTIAL: tl.constexpr,
    F_RECOMPUTED: tl.constexpr,
    F_DPROBABILITIES: tl.constexpr,
    F_DELTA: tl.constexpr,
    F_DSCORES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    F_DQ: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    q = _load(q_pointer + head * queries * DIM, rows, inside, DIM, BLOCK_DIM)
    go = _load(grad_pointer + head * queries * VALUE_DIM, rows, inside, VALUE_DIM, BLOCK_VALUE_DIM)
    reference = tl.load(reference_pointer + head * queries + rows, mask=inside, other=0.0)
    delta = tl.load(delta_pointer + head * queries + rows, mask=inside, other=0.0)
    columns = tl.arange(0, BLOCK_COLUMNS)
    begin, end = 0, tl.cdiv(keys, COLUMNS)
    if SKIPS:
        position = rows + keys - queries
        begin = tl.min(tl.where(inside, first_key(position, left), keys)) // COLUMNS
        end = tl.cdiv(tl.max(tl.where(inside, last_key(position, right, keys), 0)), COLUMNS)
    dq = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    for block in range(begin, end):
        key = block * COLUMNS + columns
        real = (columns < COLUMNS) & (key < keys)
        k = _load(k_pointer + (head // GROUP) * keys * DIM, key, real, DIM, BLOCK_DIM)
        v = _load(v_pointer + (head // GROUP) * keys * VALUE_DIM, key, real, VALUE_DIM, BLOCK_VALUE_DIM)
        _, ds = _p_and_ds(
            q,
            k,
            v,
            go,
            reference,
            delta,
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
            EXP2,
            F_EXPONENTIAL,
            F_RECOMPUTED,
            F_DPROBABILITIES,
            F_DELTA,
            F_DSCORES,
        )
        dq = add_product(dq, ds.to(k.dtype), k, PRECISION, F_DQ)
    _store(dq_pointer + head * queries * DIM, dq, rows, inside, DIM, BLOCK_DIM)


@triton.jit
def _tiled_dkv(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    grad_pointer: tl.tensor,
    reference_pointer: tl.tensor,
    delta_pointer: tl.tensor,
    dk_pointer: tl.tensor,
    dv_pointer: tl.tensor,
    bias_pointer: tl.tensor,
    slopes_pointer: tl.tensor,
    bias_stride_b: tl.tensor,
    bias_stride_h: tl.tensor,
    bias_stride_q: tl.tensor,
    bias_stride_k: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    BIAS: tl.constexpr,
    ALIBI: tl.constexpr,
    BANDED: tl.constexpr,
    PRECISION: tl.constexpr,
    F_SCORES: tl.constexpr,
    F_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    EXP2: tl.constexpr,
    SKIPS: tl.constexpr,
    F_EXPONENTIAL: tl.constexpr,
    F_RECOMPUTED: tl.constexpr,
    F_DPROBABILITIES: tl.constexpr,
    F_DELTA: tl.constexpr,
    F_DSCORES: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    F_PROBABILITIES: tl.constexpr,
    F_DK: tl.constexpr,
    F_DV: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    there = key < keys
    k = _load(k_pointer + (head // GROUP) * keys * DIM, key, there, DIM, BLOCK_DIM)
    v = _load(v_pointer + (head // GROUP) * keys * VALUE_DIM, key, there, VALUE_DIM, BLOCK_VALUE_DIM)
    offsets = tl.arange(0, BLOCK_ROWS)
    dk = tl.zeros((KEYS, BLOCK_DIM), tl.float32)
    dv = tl.zeros((KEYS, BLOCK_VALUE_DIM), tl.float32)
    begin, end = 0, tl.cdiv(queries, ROWS)
    if SKIPS:  # the queries that see any of these keys
        first_query = tl.program_id(0) * KEYS - (keys - queries)
        if right >= 0:
            begin = tl.maximum(first_query - right, 0) // ROWS
        if left >= 0:
            end = tl.minimum(end, tl.cdiv(tl.maximum(first_query + KEYS + left, 0), ROWS))
    for block in range(begin, end):
        rows = block * ROWS + offsets
        real = (offsets < ROWS) & (rows < queries)
        q = _load(q_pointer + head * queries * DIM, rows, real, DIM, BLOCK_DIM)
        go = _load(grad_pointer + head * queries * VALUE_DIM, rows, real, VALUE_DIM, BLOCK_VALUE_DIM)
        reference = tl.load(reference_pointer + head * queries + rows, mask=real, other=0.0)
        delta = tl.load(delta_pointer + head * queries + rows, mask=real, other=0.0)
        p, ds = _p_and_ds(
            q,
            k,
            v,
            go,
            reference,
            delta,
            rows,
            key,
            (~real)[:, None] | (~there)[None, :],
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
            EXP2,
            F_EXPONENTIAL,
            F_RECOMPUTED,
            F_DPROBABILITIES,
            F_DELTA,
            F_DSCORES,
        )
        cast = hold(p, F_PROBABILITIES).to(go.dtype)
        dv = add_product(dv, tl.trans(cast), go, PRECISION, F_DV)
        dk = add_product(dk, tl.trans(ds.to(q.dtype)), q, PRECISION, F_DK)
    _store(dk_pointer + head * keys * DIM, dk, key, there, DIM, BLOCK_DIM)
    _store(dv_pointer + head * keys * VALUE_DIM, dv, key, there, VALUE_DIM, BLOCK_VALUE_DIM)
