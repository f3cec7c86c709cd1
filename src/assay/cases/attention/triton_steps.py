"""What the fused kernels share: rounding to a step's format, and the scores of a tile.

Products run on the matrix units where their operands lie on the grid of a 16-bit format (exact products, FP32
sums), and elsewhere in TF32 or IEEE FP32, whichever is exact. Fused multiply-adds are switched off in every
launch: they would skip a rounding.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from assay.cases.attention.plan import Plan
from assay.cases.attention.problem import LOG2_E, Problem
from assay.formats.catalog import FP32
from assay.formats.spec import Format
from assay.formats.triton_functions import device_constants, round_nearest_even_fp32


def can_fuse(problem: Problem) -> bool:
    """Whether the kernels have every step of this problem; what they lack runs as torch operations."""
    return (
        problem.arithmetic.carrier == torch.float32
        and problem.plan.accumulator == FP32
        and problem.tiling.quantization is None
        and not problem.tiling.scale_inside
        and max(problem.q.shape[-1], problem.v.shape[-1], *problem.tiling.block) <= 256
    )


def format_constants(plan: Plan, *steps: str) -> dict[str, tuple[int, int, float, int, bool, bool]]:
    """F_STEP arguments for `hold`; the last item says whether infinities stay as they are."""
    constants = {}
    for step in steps:
        fmt: Format = getattr(plan, step)
        keeps_infinities = plan.saturate or not fmt.infinities
        constants[f"F_{step.upper()}"] = (*device_constants(fmt, saturate=plan.saturate), keeps_infinities)
    return constants


def product_dtype(plan: Plan, *steps: str) -> torch.dtype:
    """The dtype in which values of these steps are exact and the matrix units are fastest."""
    operands: list[Format] = [getattr(plan, step) for step in steps]
    if all(f.mantissa <= 7 and f.exponent <= 8 for f in operands):
        return torch.bfloat16
    if all(f.mantissa <= 10 and f.exponent <= 5 for f in operands):
        return torch.float16
    return torch.float32


def product_precision(plan: Plan, *steps: str) -> str:
    """How FP32 operands are multiplied: in TF32 where they lie on its grid."""
    return "tf32" if all(getattr(plan, step).mantissa <= 10 for step in steps) else "ieee"


def mask_arguments(problem: Problem) -> dict[str, Any]:
    """The arguments of `scores` that do not change over a launch, for any kernel that calls it."""
    masking, plan = problem.masking, problem.plan
    unit = LOG2_E if problem.tiling.exp2 else 1.0
    left, right = masking.window or (None, None)
    if masking.causal:
        right = 0
    bias, slopes = masking.bias, masking.alibi_slopes
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.float()
    strides = (0, 0, 0, 0) if bias is None else bias.stride()
    return {
        "bias_pointer": problem.q if bias is None else bias,
        "slopes_pointer": problem.q if slopes is None else slopes.float().contiguous(),
        **dict(zip(("bias_stride_b", "bias_stride_h", "bias_stride_q", "bias_stride_k"), strides, strict=True)),
        "queries": masking.queries,
        "keys": masking.keys,
        "scale": problem.scale * unit,
        "left": -1 if left is None else left,
        "right": -1 if right is None else right,
        "HEADS": problem.heads_per_batch,
        "UNIT": unit,
        "BIAS": "none" if bias is None else ("bool" if bias.dtype == torch.bool else "float"),
        "ALIBI": slopes is not None,
        "BANDED": masking.is_banded,
        **format_constants(plan, "scores", "scale"),
    }


@triton.jit
def hold(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """`Arithmetic.hold`: nothing to do for FP32."""
    if FORMAT[0] == 23 and FORMAT[1] == -126:
        return x
    else:
        rounded = round_nearest_even_fp32(x, FORMAT[0], FORMAT[1], FORMAT[2], FORMAT[3], FORMAT[4])
        if FORMAT[5]:
            rounded = tl.where(tl.abs(x) == float("inf"), x, rounded)
        return rounded


@triton.jit
def add_product(
    total: tl.tensor, a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr, FORMAT: tl.constexpr
) -> tl.tensor:
    """total + a·b held in FORMAT. An FP32 total is the accumulator of the product, as in real kernels. Otherwise it
    is written with a minus: Triton 3.6 makes a plus the accumulator too, and where the sum is then rounded bit by bit
    in the same loop, its Hopper code gives 0."""
    if FORMAT[0] == 23 and FORMAT[1] == -126:
        return tl.dot(a, b, total, input_precision=PRECISION)
    else:
        return hold(total - tl.dot(-a, b, input_precision=PRECISION), FORMAT)


@triton.jit
def exp(x: tl.tensor, EXP2: tl.constexpr) -> tl.tensor:
    """e^x or 2^x."""
    if EXP2:
        return tl.exp2(x)
    else:
        return tl.exp(x)


@triton.jit
def finite(maximum: tl.tensor) -> tl.tensor:
    """`without_minus_infinity`."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def nonzero(total: tl.tensor) -> tl.tensor:
    """A row sum to divide by: 1 for rows that see no key."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def first_key(position: tl.tensor, left: tl.tensor) -> tl.tensor:
    """`Masking.first_key`; a negative `left` is no limit."""
    return tl.where(left >= 0, tl.maximum(position - left, 0), 0)


@triton.jit
def last_key(position: tl.tensor, right: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """`Masking.last_key`; a negative `right` is no limit."""
    return tl.where(right >= 0, tl.minimum(tl.maximum(position + right + 1, 0), keys), keys)


@triton.jit
def scores(
    q: tl.tensor,
    k: tl.tensor,
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
) -> tl.tensor:
    """`Problem.scores` of one tile (rows, keys): q is (rows, D), k is (D, keys); `hidden` ones become -inf."""
    position = rows + keys - queries
    s = hold(tl.dot(q, k, input_precision=PRECISION), F_SCORES)
    s = hold(s * scale, F_SCALE)
    if ALIBI:
        slope = tl.load(slopes_pointer + head)
        distance = tl.abs(position[:, None] - key[None, :]).to(tl.float32)
        s = hold(s + (-slope * distance) * UNIT, F_SCALE)
    if BIAS != "none":
        start = bias_pointer + (head // HEADS) * bias_stride_b + (head % HEADS) * bias_stride_h
        offsets = rows.to(tl.int64)[:, None] * bias_stride_q + key.to(tl.int64)[None, :] * bias_stride_k
        inside = (rows < queries)[:, None] & (key < keys)[None, :]
        bias = tl.load(start + offsets, mask=inside, other=0)
        if BIAS == "bool":
            hidden = hidden | (bias == 0)
        else:
            # The most negative number, a common mask, must not become -inf: such rows still see their keys.
            scaled = tl.minimum(tl.maximum(bias * UNIT, -3.4028234663852886e38), 3.4028234663852886e38)
            s = hold(s + tl.where(tl.abs(bias) == float("inf"), bias, scaled), F_SCALE)
    if BANDED:
        hidden = hidden | (key[None, :] < first_key(position, left)[:, None])
        hidden = hidden | (key[None, :] >= last_key(position, right, keys)[:, None])
    return tl.where(hidden, float("-inf"), s)
