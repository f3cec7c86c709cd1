"""With V = 1 attention is 1: what is left of it where the row sum is taken of P before its cast, and after it.

By the emulation of the shipped kernels (every step FP32 but P), with the output as it is before its own rounding;
N(0, 1) inputs, D 64, 8 heads, 3 seeds. Runs on any machine, in seconds.
"""

from __future__ import annotations

import torch

from assay import Plan, round_to, tiled_attention
from assay.cases.attention.inputs import DISTRIBUTIONS

LENGTHS = (64, 256, 1024, 4096)
SEEDS = 3


def misses(length: int, format: str, after: bool) -> torch.Tensor:
    """By how much each output misses 1."""
    found = []
    for seed in range(SEEDS):
        draw = DISTRIBUTIONS["normal"].draw((1, 8, length, 64), torch.Generator().manual_seed(seed))
        q, k = (round_to(x, format) for x in draw[:2])
        plan = Plan.shipped(format).replace(output="fp32")
        found.append(tiled_attention(q, k, torch.ones_like(k), plan=plan, sum_after_cast=after).double()[..., 0] - 1)
    return torch.cat(found).flatten()


def main() -> None:
    print(f"torch {torch.__version__}; RMSE and mean of the output - 1, V = 1")
    for format in ("bf16", "fp16"):
        for length in LENGTHS:
            before, after = misses(length, format, False), misses(length, format, True)
            line = ", ".join(f"{x.square().mean().sqrt():.1e} {x.mean():+.1e}" for x in (before, after))
            print(f"P in {format}, N {length:4}: sum before the cast, after it: {line}", flush=True)


if __name__ == "__main__":
    main()
