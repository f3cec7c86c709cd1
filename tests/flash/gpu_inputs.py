"""Inputs of tests that need a GPU."""

from __future__ import annotations

import torch


def inputs(heads: int, length: int, dim: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, heads, length, dim, device="cuda", generator=generator).to(dtype) for _ in range(3)]
