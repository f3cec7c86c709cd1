"""Standard attention, which writes the whole matrix of scores out: what flash is measured against."""

from __future__ import annotations

import functools

import torch


def standard_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v as plain operations in the dtype of the inputs."""
    scores: torch.Tensor = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(_hidden(q.shape[2], k.shape[2], q.device), -torch.inf)
    return scores.softmax(dim=-1) @ v


@functools.lru_cache(maxsize=1)
def _hidden(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """True where a key is later than the query. Made once: a model shares its mask between layers and steps."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)
