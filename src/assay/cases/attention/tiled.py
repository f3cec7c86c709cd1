"""Tiled (Flash) attention re-implemented numerically: any format at any step, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from assay.cases.attention.arithmetic import exactly, result_dtype
from assay.cases.attention.blocks import Block
from assay.cases.attention.checks import check_call, check_plan, check_scale, refuse_double_backward
from assay.cases.attention.masking import Masking, Window
from assay.cases.attention.plan import Plan
from assay.cases.attention.problem import Order, Problem, Tiling
from assay.cases.attention.quantization import Quantization
from assay.cases.attention.tiled_backward import backward
from assay.cases.attention.tiled_forward import forward


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: Plan,
    order: Order = "fa2",
    block: Block = (64, 64),
    causal: bool = False,
    window: Window | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    scale: float | None = None,
    reverse_keys: bool = False,
    splits: int = 2,
    exp2: bool = False,
    lazy_threshold: float | None = None,
    sum_after_cast: bool = False,
    tie_shift: float | None = None,
    probability_shift: int = 0,
    scale_inside: bool = False,
    quantization: Quantization | None = None,
) -> torch.Tensor:
    """Flash Attention with every step rounded as `plan` says, for q (B, H, Nq, D), k and v (B, Hkv, Nk, D).

    Args:
        q: queries.
        k: keys; their heads divide the query heads (GQA, MQA).
        v: values; their head dimension may differ.
        plan: the format of every step.
        order: "fa1" normalises the output at every block of keys, "fa2" once at the end, "split_kv" runs fa2
            over `splits` parts of the keys and merges them.
        block: (rows, columns) of a tile; see `blocks.block_from_sram` for the paper's rule.
        causal: aligned bottom-right, as flash-attention's: the last query sees the last key.
        window: (left, right) keys around its own position that a query sees; None on a side: no limit.
        bias: added to the scaled scores, or a bool mask (True = seen); broadcasts to (B, H, Nq, Nk).
        alibi_slopes: (H,) or (B, H); slope · distance is subtracted from the scores.
        scale: of the scores; 1/√D by default.
        reverse_keys: forward takes the blocks of keys from the last to the first, as FA2's kernel does.
        splits: parts of "split_kv".
        exp2: take powers of two, with log₂e folded into the scale.
        lazy_threshold: rescale only when the maximum grew by more than this.
        sum_after_cast: sum P as P·V sees it.
        tie_shift: β of the tie-safe maximum.
        probability_shift: P is scaled up by 2^shift before its cast.
        scale_inside: backward scales each block's dQ and dK before adding it up, as torch's CPU kernel does.
        quantization: scale (and rotate) the inputs into the range of the plan's input format. Forward only.

    Returns the output in q's dtype where that holds every value of `plan.output`, else in FP32 or FP64.
    Gradients follow the same plan. Rows that see no key give 0.
    """
    check_plan(plan)
    masking = check_call(q, k, v, causal=causal, window=window, bias=bias, alibi_slopes=alibi_slopes)
    tiling = Tiling(
        order=order,
        block=block,
        reverse_keys=reverse_keys,
        splits=splits,
        exp2=exp2,
        lazy_threshold=lazy_threshold,
        sum_after_cast=sum_after_cast,
        tie_shift=tie_shift,
        probability_shift=probability_shift,
        scale_inside=scale_inside,
        quantization=quantization,
    )
    factor = check_scale(scale, q.shape[-1])
    out: torch.Tensor = _TiledAttention.apply(q, k, v, plan, tiling, masking, factor)
    return out


class _TiledAttention(torch.autograd.Function):
    """Forward keeps its inputs, its output and the log-sum-exp; backward computes the rest again."""

    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Plan,
        tiling: Tiling,
        masking: Masking,
        scale: float,
    ) -> torch.Tensor:
        problem = Problem(q, k, v, plan=plan, tiling=tiling, masking=masking, scale=scale)
        out, lse = forward(problem)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = {"plan": plan, "tiling": tiling, "masking": masking, "scale": scale}
        shaped: torch.Tensor = out.unflatten(0, q.shape[:2])
        return shaped.to(result_dtype(q.dtype, plan))

    @staticmethod
    @exactly
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_double_backward()
        q, k, v, out, lse = ctx.saved_tensors
        if ctx.how["tiling"].quantization is not None:
            raise ValueError("quantization is forward only, as in FA3; train with a plan without it.")
        problem = Problem(q, k, v, **ctx.how)
        gradients = backward(problem, out, lse, grad.flatten(0, 1))
        shaped = (g.reshape(x.shape).to(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))
        return *shaped, None, None, None, None
