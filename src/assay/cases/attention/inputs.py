"""Inputs to measure attention on: drawn from a named distribution, or read from a file.

All are FP64 on the CPU, drawn from a generator of their own: the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from assay._suggest import did_you_mean

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


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
        return f"captured: {Path(name.removeprefix(FROM_FILE)).name}"
    return DISTRIBUTIONS[name].words


def draw_inputs(name: str, shape: Shape, seed: int) -> Inputs:
    """Inputs of `shape`; the gradient is N(0, 1) whatever the distribution.

    Captured inputs have the shape they have: of those a seed picks one head, so that there is an interval.
    """
    generator = torch.Generator().manual_seed(seed)
    if check_inputs(name).startswith(FROM_FILE):
        q, k, v = _one_head(Path(name.removeprefix(FROM_FILE)), seed)
    else:
        q, k, v = DISTRIBUTIONS[name].draw(shape, generator)
    return Inputs(q, k, v, _normal((*q.shape[:3], v.shape[3]), generator))


class Captured(NamedTuple):
    """What a safetensors file with q, k and v holds."""

    heads: int
    """Query heads of all batch entries."""
    shape: Shape
    """Of the queries of one head."""
    keys: int


def captured(path: Path) -> Captured:
    """Look at a file of captured inputs; a ValueError says what is wrong with it."""
    q, k, _ = _load(path)
    return Captured(q.shape[0] * q.shape[1], (1, 1, q.shape[2], q.shape[3]), k.shape[2])


def _one_head(path: Path, head: int) -> Three:
    q, k, v = _load(path)
    heads = q.shape[0] * q.shape[1]
    if head >= heads:
        raise ValueError(f"{path} has {heads} heads; a seed picks one of them, got seed {head}. Use fewer seeds.")
    group = q.shape[1] // k.shape[1]
    batch, own = divmod(head, q.shape[1])
    return (
        q[batch, own][None, None].double(),
        k[batch, own // group][None, None].double(),
        v[batch, own // group][None, None].double(),
    )


def _load(path: Path) -> Three:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    missing = [name for name in ("q", "k", "v") if name not in found]
    if missing:
        raise ValueError(f"{path} must have tensors q, k and v; it has {', '.join(found) or 'none'}.")
    q, k, v = found["q"], found["k"], found["v"]
    shapes = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in (q, k, v))
    if not all(x.dim() == 4 and x.is_floating_point() and x.numel() for x in (q, k, v)):
        raise ValueError(f"q, k and v in {path} must be float of shape (batch, heads, length, dim), got {shapes}.")
    fits = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k and v in {path} must share the batch, k and v their heads and length, q and k their dim, and the "
            f"key heads must divide the query heads; got {shapes}."
        )
    if not all(bool(x.isfinite().all()) for x in (q, k, v)):
        raise ValueError(f"q, k and v in {path} must be finite, but there are NaN or infinities among them.")
    return q, k, v
