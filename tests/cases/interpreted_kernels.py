"""Run the fused attention kernels in Triton's interpreter and hold them to the torch path, bit for bit.

A program of its own, since TRITON_INTERPRET must be set before Triton is imported. The interpreter multiplies raw
bf16 bits, so products run in FP32 here, where 16-bit operands are exact too.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from assay import Plan, deviation
from assay.cases.attention import tiled_backward, tiled_forward, triton_backward, triton_forward
from assay.cases.attention.checks import check_call
from assay.cases.attention.problem import Problem, Tiling
from tests.cases.inputs import qkv

PLANS = (
    Plan.uniform("bf16"),
    Plan.shipped("bf16"),
    Plan.uniform("fp16"),
    Plan.uniform("fp8_e4m3").replace(saturate=True),
    Plan.uniform("fp32"),
)


def _cases() -> list[tuple[Tiling, dict[str, Any]]]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(1, 2, 20, 29, generator=generator) > 0.3
    slopes, bias = torch.rand(2, generator=generator), torch.randn(20, 29, generator=generator)
    return [
        (Tiling(order="fa1", block=(16, 12)), {"causal": True}),
        (Tiling(order="fa2", block=(16, 12), reverse_keys=True), {"causal": True}),
        (Tiling(order="split_kv", block=(16, 7), splits=3), {"causal": True}),
        (
            Tiling(block=(16, 16), exp2=True, lazy_threshold=4.0, sum_after_cast=True),
            {"causal": True, "window": (9, None)},
        ),
        (Tiling(block=(16, 16), tie_shift=2.0, probability_shift=3), {"alibi_slopes": slopes, "bias": bias}),
        (Tiling(order="fa1", block=(8, 10)), {"window": (3, 5), "bias": hidden}),
    ]


def _problem(plan: Plan, tiling: Tiling, masks: dict[str, Any]) -> Problem:
    q, k, v = qkv(20, 29, heads=2, kv_heads=1, dim=24, value_dim=20)
    defaults: dict[str, Any] = {"causal": False, "window": None, "bias": None, "alibi_slopes": None}
    masking = check_call(q, k, v, **(defaults | masks))
    return Problem(q, k, v, plan=plan, tiling=tiling, masking=masking, scale=24**-0.5)


def _check(name: str, plan: Plan, fused: torch.Tensor, torch_path: torch.Tensor) -> None:
    """Rounded steps hide the order of FP32 sums but for a rare moved rounding; an FP32 plan shows it."""
    worst = deviation(fused, torch_path)
    budget = 4e-7 if plan == Plan.uniform("fp32") else plan.output.epsilon / 16
    assert worst.relative <= budget, f"{plan.name}, {name}: relative difference {worst.relative:.2e} > {budget:.2e}"


def main() -> None:
    """Every plan with every tiling, forward and backward."""
    np.seterr(all="ignore")  # the interpreter computes log(0) and −inf + inf where the kernel does
    for module in (triton_forward, triton_backward):
        setattr(module, "product_dtype", lambda plan, *steps: torch.float32)  # noqa: B010
    checked = 0
    for plan in PLANS:
        for tiling, masks in _cases():
            problem = _problem(plan, tiling, masks)
            grad = torch.randn(2, 20, 20, generator=torch.Generator().manual_seed(9))
            results = []
            for kernels in (None, (triton_forward, triton_backward)):
                for module in (tiled_forward, tiled_backward):
                    setattr(module, "fused_kernels", lambda _, kernels=kernels: kernels)  # noqa: B010
                out, lse = tiled_forward.forward(problem)
                results.append((out, *tiled_backward.backward(problem, out, lse, grad)))
            for name, mine, reference in zip(("output", "dq", "dk", "dv"), *reversed(results), strict=True):
                _check(f"{tiling} {name}", plan, mine.float(), reference.float())
                checked += 1
    print(f"{checked} tensors agree")


if __name__ == "__main__":
    main()
