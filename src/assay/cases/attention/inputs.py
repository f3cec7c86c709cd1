"""Inputs to measure attention on: drawn from a named distribution, or read from a file.

All are FP64 on the CPU, drawn from a generator of their own: the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from assay._suggest import did_you_mean
from assay.cases.attention.captured import How, captured, one_head
from assay.cases.attention.captured_file import Three

Shape = tuple[int, int, int, int]
"""(batch, heads, length, head dimension)"""
FROM_FILE = "file:"
"""What the name of captured inputs begins with; the rest is the path."""


class Inputs(NamedTuple):
    """Q, K, V and the gradient of the output, (B, H, N, D) in FP64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor


class Distribution(NamedTuple):
    """How inputs are drawn."""

    words: str
    draw: Callable[[Shape, torch.Generator], Three]


def _uniform(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _normal(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _outliers(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """FA3's test: one value in a thousand is a hundred times more variable."""
    rare = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.001
    return _normal(shape, generator) + 10 * _normal(shape, generator) * rare


def _three(draw: Callable[[Shape, torch.Generator], torch.Tensor]) -> Callable[[Shape, torch.Generator], Three]:
    return lambda shape, generator: (draw(shape, generator), draw(shape, generator), draw(shape, generator))


def _tied(shape: Shape, generator: torch.Generator) -> Three:
    """Every key comes twice, side by side, so that the largest score of every row is there twice."""
    q, k, v = (_normal(shape, generator) for _ in range(3))
    return q, k[:, :, : (shape[2] + 1) // 2].repeat_interleave(2, dim=2)[:, :, : shape[2]], v


def _low_rank(shape: Shape, generator: torch.Generator) -> Three:
    """Q and K of rank 4: rows are alike, as those of trained models are."""
    rank = 4

    def thin() -> torch.Tensor:
        rows = _normal((*shape[:3], rank), generator)
        return torch.matmul(rows, _normal((*shape[:2], rank, shape[3]), generator)).div(rank**0.5)

    return thin(), thin(), _normal(shape, generator)


def _large_logits(shape: Shape, generator: torch.Generator) -> Three:
    """Scores with a standard deviation of 16, so that softmax is nearly one-hot, as in trained models."""
    q, k, v = (_normal(shape, generator) for _ in range(3))
    return 4 * q, 4 * k, v


DISTRIBUTIONS = {
    "uniform": Distribution("uniform on [0, 1)", _three(_uniform)),
    "normal": Distribution("N(0, 1)", _three(_normal)),
    "outliers": Distribution("N(0, 1) + N(0, 100)·Bernoulli(0.001)", _three(_outliers)),
    "tied": Distribution("N(0, 1), every key twice: tied maxima", _tied),
    "low_rank": Distribution("N(0, 1), Q and K of rank 4", _low_rank),
    "large_logits": Distribution("N(0, 1), Q and K four times as large: scores of ±16 and more", _large_logits),
}


def check_inputs(name: str) -> str:
    """`name` itself, if it is a distribution or a file that is there."""
    if name.startswith(FROM_FILE):
        path = Path(name.removeprefix(FROM_FILE))
        if not path.is_file():
            raise ValueError(f"Inputs from a file need the path of a safetensors file, but {path} is not a file.")
        return name
    if name not in DISTRIBUTIONS:
        hint = did_you_mean(name, DISTRIBUTIONS)
        raise ValueError(
            f"Unknown inputs {name!r}. {hint}There are: {', '.join(DISTRIBUTIONS)}; or {FROM_FILE}PATH of a "
            "safetensors file with q, k and v."
        )
    return name


def describe_inputs(name: str) -> str:
    """In words, for a table or a caption."""
    if name.startswith(FROM_FILE):
        path = Path(name.removeprefix(FROM_FILE))
        return _describe_captured(path, path.stat().st_mtime_ns)
    return DISTRIBUTIONS[name].words


@lru_cache(maxsize=32)
def _describe_captured(path: Path, changed: int) -> str:
    """Once for a file, since every point of a sweep asks."""
    found = captured(path)
    return ", ".join(filter(None, (f"captured: {path.name}", found.layer, "masked" if found.masked else "")))


def draw_inputs(name: str, shape: Shape, seed: int) -> Inputs:
    """Inputs of `shape`; the gradient is N(0, 1) whatever the distribution.

    Captured inputs have the shape they have: of those a seed picks one head, so that there is an interval.
    """
    generator = torch.Generator().manual_seed(seed)
    if check_inputs(name).startswith(FROM_FILE):
        (q, k, v), _ = one_head(Path(name.removeprefix(FROM_FILE)), seed)
    else:
        q, k, v = DISTRIBUTIONS[name].draw(shape, generator)
    return Inputs(q, k, v, _normal((*q.shape[:3], v.shape[3]), generator))


def how_called(name: str, seed: int) -> How:
    """The scale and the mask that captured inputs came with; nothing for drawn ones."""
    return one_head(Path(name.removeprefix(FROM_FILE)), seed)[1] if name.startswith(FROM_FILE) else How()
