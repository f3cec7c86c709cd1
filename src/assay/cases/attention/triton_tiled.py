"""The forward pass of `tiled_forward` as one fused Triton kernel: the same steps, the same roundings.

A program takes some rows of one head over all their blocks of keys; scores and exponentials never leave the
chip. Products run on the matrix units where their operands lie on the grid of a 16-bit format (exact products,
FP32 sums), and elsewhere in TF32 or IEEE FP32, whichever is exact. Fused multiply-adds are switched off:
they would skip a rounding.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from assay.cases.attention.plan import Plan
from assay.cases.attention.problem import LOG2_E, Problem
from assay.formats.catalog import FP32
from assay.formats.spec import Format
from assay.formats.triton_functions import device_constants, round_nearest_even_fp32

_FORWARD_FORMATS = (
    "scores",
    "scale",
    "maximum",
    "exponential",
    "row_sum",
    "rescale",
    "probabilities",
    "output_accumulator",
    "normalization",
    "log_sum_exp",
)


def can_fuse(problem: Problem) -> bool:
    """Whether the kernel has every step of this problem; what it lacks runs as torch operations."""
    dims = max(problem.q.shape[-1], problem.v.shape[-1])
    return (
        problem.arithmetic.carrier == torch.float32
        and problem.plan.accumulator == FP32
        and problem.tiling.quantization is None
        and dims <= 256
        and problem.tiling.block[1] <= 256
    )


def over_keys(problem: Problem, part: tuple[int, int] = (0, 1)) -> tuple[torch.Tensor, torch.Tensor]:
    """`tiled_forward._over_keys` for all heads and rows: the output (heads, Dv, rows) and the log-sum-exp."""
    heads, queries, dim = problem.q.shape
    keys, value_dim = problem.v.shape[1:]
    masking, tiling = problem.masking, problem.tiling
    out = torch.empty(heads, queries, value_dim, dtype=torch.float32, device=problem.q.device)
    lse = torch.empty(heads, queries, dtype=torch.float32, device=problem.q.device)
    q, k, v = (x.to(_product_dtype(problem.plan)) for x in (problem.q, problem.k, problem.v))
    bias = masking.bias
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.float()
    blocks = -(-keys // tiling.block[1])
    share = -(-blocks // part[1])
    rows, warps = _launch_shape(problem)
    left, right = masking.window or (None, None)
    if masking.causal:
        right = 0
    with torch.cuda.device_of(q):
        _tiled_forward[(triton.cdiv(queries, rows), heads)](
            q,
            k,
            v,
            out,
            lse,
            out if bias is None else bias,
            out if masking.alibi_slopes is None else masking.alibi_slopes.float().contiguous(),
            *((0, 0, 0, 0) if bias is None else bias.stride()),
            queries,
            keys,
            part[0] * share,
            min(blocks, (part[0] + 1) * share),
            problem.scale * (LOG2_E if tiling.exp2 else 1.0),
            -1 if left is None else left,
            -1 if right is None else right,
            HEADS=problem.heads_per_batch,
            GROUP=problem.group,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
            BLOCK_VALUE_DIM=max(16, triton.next_power_of_2(value_dim)),
            ROWS=rows,
            ROW_BLOCK=tiling.block[0],
            COLUMNS=tiling.block[1],
            BLOCK_COLUMNS=max(16, triton.next_power_of_2(tiling.block[1])),
            FA1=tiling.order == "fa1",
            EXP2=tiling.exp2,
            UNIT=LOG2_E if tiling.exp2 else 1.0,
            LAZY=tiling.lazy_threshold,
            SUM_AFTER_CAST=tiling.sum_after_cast,
            TIE_SHIFT=tiling.tie_shift,
            SHIFT=tiling.probability_shift,
            BIAS="none" if bias is None else ("bool" if bias.dtype == torch.bool else "float"),
            ALIBI=masking.alibi_slopes is not None,
            BANDED=masking.is_banded,
            SKIPS=problem.skips,
            PRECISION=_product_precision(problem.plan),
            **{f"F_{step.upper()}": _constants(problem.plan, step) for step in _FORWARD_FORMATS},
            num_warps=warps,
            num_stages=2,
            enable_fp_fusion=False,
        )
    return out.transpose(1, 2), lse


def _constants(plan: Plan, step: str) -> tuple[int, int, float, int, bool, bool]:
    """What the kernel knows of a step's format; the last says whether infinities stay as they are."""
    fmt: Format = getattr(plan, step)
    return *device_constants(fmt, saturate=plan.saturate), plan.saturate or not fmt.infinities


def _product_dtype(plan: Plan) -> torch.dtype:
    """The dtype in which the operands of both products are exact and the units are fastest."""
    operands = (plan.inputs, plan.probabilities)
    if all(f.mantissa <= 7 and f.exponent <= 8 for f in operands):
        return torch.bfloat16
    if all(f.mantissa <= 10 and f.exponent <= 5 for f in operands):
        return torch.float16
    return torch.float32


def _product_precision(plan: Plan) -> str:
    return "tf32" if max(plan.inputs.mantissa, plan.probabilities.mantissa) <= 10 else "ieee"


def _launch_shape(problem: Problem) -> tuple[int, int]:
    """Rows of a program and its warps: as many as the registers hold."""
    widest = max(problem.q.shape[-1], problem.v.shape[-1], problem.tiling.block[1])
    if _product_dtype(problem.plan) == torch.float32:
        return (32, 4) if widest <= 128 else (16, 4)
    return (64, 4) if widest <= 128 else (32, 4)


@triton.jit
def _hold(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """`Arithmetic.hold`: nothing to do for FP32."""
    if FORMAT[0] == 23 and FORMAT[1] == -126:
        return x
    else:
        rounded = round_nearest_even_fp32(x, FORMAT[0], FORMAT[1], FORMAT[2], FORMAT[3], FORMAT[4])
        if FORMAT[5]:
            rounded = tl.where(tl.abs(x) == float("inf"), x, rounded)
        return rounded


@triton.jit
def _exp(x: tl.tensor, EXP2: tl.constexpr) -> tl.tensor:
    if EXP2:
        return tl.exp2(x)
    else:
        return tl.exp(x)


@triton.jit
def _finite(maximum: tl.tensor) -> tl.tensor:
    """`without_minus_infinity`."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _nonzero(total: tl.tensor) -> tl.tensor:
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def _first_key(position: tl.tensor, left: tl.tensor) -> tl.tensor:
    return tl.where(left >= 0, tl.maximum(position - left, 0), 0)


@triton.jit
def _last_key(position: tl.tensor, right: tl.tensor, keys: tl.tensor) -> tl.tensor:
    return tl.where(right >= 0, tl.minimum(tl.maximum(position + right + 1, 0), keys), keys)


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
    position = rows + keys - queries
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
    seen_first = _first_key(block_first, left)
    seen_last = _last_key(block_last, right, keys)
    if SKIPS:
        begin = tl.maximum(begin, tl.min(tl.where(inside, seen_first, keys)) // COLUMNS)
        end = tl.minimum(end, tl.cdiv(tl.max(tl.where(inside, seen_last, 0)), COLUMNS))

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, BLOCK_VALUE_DIM), tl.float32)
    for block in range(begin, end):
        key = block * COLUMNS + columns
        real = (columns < COLUMNS) & (key < keys)
        k_offsets = key[None, :] * DIM + dims[:, None]
        k = tl.load(k_start + k_offsets, mask=real[None, :] & (dims < DIM)[:, None], other=0.0)
        s = _hold(tl.dot(q, k, input_precision=PRECISION), F_SCORES)
        s = _hold(s * scale, F_SCALE)
        hidden = (~real)[None, :]
        if ALIBI:
            slope = tl.load(slopes_pointer + head)
            distance = tl.abs(position[:, None] - key[None, :]).to(tl.float32)
            s = _hold(s + (-slope * distance) * UNIT, F_SCALE)
        if BIAS != "none":
            bias_start = bias_pointer + (head // HEADS) * bias_stride_b + (head % HEADS) * bias_stride_h
            bias_offsets = rows.to(tl.int64)[:, None] * bias_stride_q + key[None, :] * bias_stride_k
            bias_mask = inside[:, None] & real[None, :]
            bias = tl.load(bias_start + bias_offsets, mask=bias_mask, other=0)
            if BIAS == "bool":
                hidden = hidden | (bias == 0)
            else:
                s = _hold(s + bias * UNIT, F_SCALE)
        if BANDED:
            hidden = hidden | (key[None, :] < _first_key(position, left)[:, None])
            hidden = hidden | (key[None, :] >= _last_key(position, right, keys)[:, None])
        s = tl.where(hidden, float("-inf"), s)

        local = _hold(tl.max(s, 1), F_MAXIMUM)
        if TIE_SHIFT is not None:
            tied = (tl.sum((s == local[:, None]).to(tl.int32), 1) > 1) & (local > float("-inf"))
            shifted = _hold(tl.where(local > 0, local * TIE_SHIFT, 0.0), F_MAXIMUM)
            local = tl.where(tied & (local != 0), shifted, local)
        running = tl.maximum(maximum, local)
        if LAZY is not None:
            running = tl.where(running - maximum > LAZY, running, maximum)
        latest = _finite(running)
        reference = _finite(local) if FA1 else latest

        p = _hold(_exp(_hold(s - reference[:, None], F_EXPONENTIAL), EXP2), F_EXPONENTIAL)
        if SHIFT != 0:
            p = _hold(p * (2.0**SHIFT), F_EXPONENTIAL)
        cast = _hold(p, F_PROBABILITIES)
        sums = _hold(tl.sum(cast if SUM_AFTER_CAST else p, 1), F_ROW_SUM)
        v_offsets = key[:, None] * VALUE_DIM + value_dims[None, :]
        v = tl.load(v_start + v_offsets, mask=real[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        products = tl.dot(cast.to(v.dtype), v, input_precision=PRECISION)
        products = _hold(products, F_OUTPUT_ACCUMULATOR)
        factor = _hold(_exp(_hold(maximum - latest, F_RESCALE), EXP2), F_RESCALE)
        rescaled = _hold(row_sum * factor, F_ROW_SUM)
        if FA1:
            weight = _hold(_exp(_hold(local - latest, F_RESCALE), EXP2), F_RESCALE)
            carried = _hold(row_sum * factor, F_RESCALE)
            total = _hold(rescaled + _hold(sums * weight, F_ROW_SUM), F_ROW_SUM)
            updated = _hold(output * carried[:, None], F_OUTPUT_ACCUMULATOR)
            weighed = _hold(products * weight[:, None], F_OUTPUT_ACCUMULATOR)
            updated = _hold(updated + weighed, F_OUTPUT_ACCUMULATOR)
            divisor = tl.broadcast_to(_nonzero(total)[:, None], (ROWS, BLOCK_VALUE_DIM))
            updated = _hold(tl.math.div_rn(updated, divisor), F_NORMALIZATION)
            updated = _hold(updated, F_OUTPUT_ACCUMULATOR)
            # Adding nothing is not nothing in fa1: rows whose block skips this one keep what they had.
            first, last = block * COLUMNS, (block + 1) * COLUMNS
            skipped = (seen_last <= first) | (seen_first >= last) if SKIPS else rows < 0
            output = tl.where(skipped[:, None], output, updated)
            row_sum = tl.where(skipped, row_sum, total)
        else:
            row_sum = _hold(rescaled + sums, F_ROW_SUM)
            output = _hold(output * factor[:, None], F_OUTPUT_ACCUMULATOR)
            output = _hold(output + products, F_OUTPUT_ACCUMULATOR)
        maximum = running

    if not FA1:
        divisor = tl.broadcast_to(_nonzero(row_sum)[:, None], (ROWS, BLOCK_VALUE_DIM))
        output = _hold(tl.math.div_rn(output, divisor), F_NORMALIZATION)
    log = tl.log(row_sum) - SHIFT * 0.6931471805599453
    lse = _hold(maximum * (0.6931471805599453 if EXP2 else 1.0) + log, F_LOG_SUM_EXP)
    out_offsets = (head * queries + rows)[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(out_pointer + out_offsets, output, mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :])
    tl.store(lse_pointer + head * queries + rows, lse, mask=inside)
