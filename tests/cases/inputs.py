"""Inputs for the attention tests."""

from __future__ import annotations

import torch


def qkv(
    queries: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    dim: int = 32,
    value_dim: int | None = None,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """N(0, 1) in FP32."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads = kv_heads or heads
    return (
        torch.randn(batch, heads, queries, dim, generator=generator),
        torch.randn(batch, kv_heads, keys, dim, generator=generator),
        torch.randn(batch, kv_heads, keys, value_dim or dim, generator=generator),
    )
