"""Optimizers by name, and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

OPTIMIZERS = ("adamw", "sgd", "muon")


def make_optimizers(name: str, model: nn.Module, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """One, or two for Muon: it takes the matrices inside the model, AdamW the rest.

    Vectors (norms and biases) are not decayed.
    """
    named = list(model.named_parameters())
    if name == "muon":
        inner = [p for n, p in named if p.ndim == 2 and not _is_outer(n)]
        rest = [(n, p) for n, p in named if p.ndim != 2 or _is_outer(n)]
        return [
            torch.optim.Muon(inner, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(_groups(rest, decay), lr=rate, betas=(0.9, 0.95)),
        ]
    if name == "sgd":
        return [torch.optim.SGD(_groups(named, decay), lr=rate, momentum=0.9)]
    return [torch.optim.AdamW(_groups(named, decay), lr=rate, betas=(0.9, 0.95))]


def _is_outer(name: str) -> bool:
    """Embeddings and the last layer, which Muon's authors leave to AdamW."""
    return any(part in name for part in ("embed", "head", "last", "patches", "position"))


def _groups(named: list[tuple[str, nn.Parameter]], decay: float) -> list[dict[str, object]]:
    matrices, vectors = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim <= 1]
    groups: list[dict[str, object]] = [{"params": matrices, "weight_decay": decay}]
    return [*groups, {"params": vectors, "weight_decay": 0.0}] if vectors else groups


def learning_rate(step: int, steps: int, warmup: int, rate: float) -> float:
    """At `step`, counted from 0: up in a line, then down a cosine to a tenth."""
    if step < warmup:
        return rate * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """For the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def states(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """What the optimizers keep, by parameter: ("exp_avg blocks.0.query", tensor), …, counters included."""
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} {name}", value
