"""The inputs that a test is run on: as given, or drawn for every distribution and seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from assay.budgets.runs import Tensors
from assay.cases.attention.inputs import DISTRIBUTIONS

Inputs = Tensors | Callable[..., Tensors]


class Draw(NamedTuple):
    """One set of inputs."""

    distribution: str | None
    seed: int | None
    tensors: Tensors


def draws(inputs: Inputs, seeds: int, distributions: Sequence[str] | None) -> Iterator[Draw]:
    """All sets of inputs, one after the other, so that one is in memory at a time."""
    if not callable(inputs):
        if distributions is not None:
            raise ValueError("distributions need inputs that are a function of (seed, distribution), got tensors.")
        yield Draw(None, None, _check(inputs, "inputs"))
        return
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ValueError(f"seeds must be a whole number of at least 1, got {seeds!r}.")
    if not _takes_distribution(inputs):
        if distributions is not None:
            raise ValueError(
                "distributions need a function of (seed, distribution) for inputs; it takes only the seed."
            )
        for seed in range(seeds):
            yield Draw(None, seed, _check(inputs(seed), f"inputs({seed})"))
        return
    if isinstance(distributions, str) or (distributions is not None and not distributions):
        raise ValueError(f"distributions must be several names, or None for ours; got {distributions!r}.")
    for distribution in tuple(DISTRIBUTIONS) if distributions is None else distributions:
        for seed in range(seeds):
            tensors = inputs(seed, distribution=distribution)
            yield Draw(distribution, seed, _check(tensors, f"inputs({seed}, {distribution!r})"))


def _takes_distribution(function: Callable[..., Tensors]) -> bool:
    try:
        return "distribution" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _check(tensors: object, where: str) -> Tensors:
    if not isinstance(tensors, tuple | list) or not all(isinstance(x, torch.Tensor) for x in tensors):
        got = type(tensors).__name__
        if isinstance(tensors, tuple | list):
            got = f"({', '.join(type(x).__name__ for x in tensors)})"
        what = "Bind everything else beforehand: lambda q, k, v: f(q, k, v, causal=True)."
        if isinstance(tensors, torch.Tensor):
            what = "One tensor is given as (x,)."
        raise ValueError(f"{where} must be a tuple of tensors, got {got}. {what}")
    if not any(x.is_floating_point() for x in tensors):
        raise ValueError(f"{where} must have a floating tensor among them, got {[str(x.dtype) for x in tensors]}.")
    return tuple(tensors)
