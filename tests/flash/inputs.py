"""Inputs of tests that call attention as a user does."""

from __future__ import annotations

import torch


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(queries: int = 20, keys: int = 20, heads: tuple[int, int] = (4, 4), dim: int = 16) -> list[torch.Tensor]:
    return [draw(2, heads[0], queries, dim)] + [draw(2, heads[1], keys, dim, seed=i) for i in (1, 2)]


CU = torch.tensor([0, 5, 20], dtype=torch.int32)
