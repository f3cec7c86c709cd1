"""In which order a training sees its data. It depends on the seed, and on nothing else."""

from __future__ import annotations

import functools

import numpy as np
import torch

from assay.data.bits import bits

_EPOCHS, _SPLIT = 0, 1
"""Streams of random bits that are not each other's."""


def indices(count: int, batch: int, seed: int, step: int) -> torch.Tensor:
    """int64 (batch,): which of `count` examples the step sees, the first step being 0.

    Each epoch is a permutation of its own; a batch that reaches the end of one goes on in the next.
    """
    for name, value, least in (("count", count, 1), ("batch", batch, 1), ("step", step, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    found = np.empty(batch, np.int64)
    done = 0
    while done < batch:
        epoch, start = divmod(step * batch + done, count)
        piece = _permutation(count, seed, _EPOCHS, epoch)[start : start + batch - done]
        found[done : done + len(piece)] = piece
        done += len(piece)
    return torch.from_numpy(found)


def held_out(count: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(to train on, held out): two sorted lists of indices without overlap. A share above 0 holds out at least one."""
    if not 0 <= share < 1:
        raise ValueError(f"share must be at least 0 and less than 1, got {share!r}.")
    held = max(1, round(count * share)) if share else 0
    if held >= count:
        raise ValueError(f"Something must be left to train on, but {held} of {count} are held out. Lower the share.")
    mixed = torch.from_numpy(_permutation(count, seed, _SPLIT).copy())
    return mixed[held:].sort().values, mixed[:held].sort().values


@functools.lru_cache(maxsize=8)
def _permutation(count: int, seed: int, *names: int) -> np.ndarray:
    """Sorting random numbers is a shuffle whose result no library's version changes."""
    found = np.argsort(bits(count, seed, *names), kind="stable")
    found.setflags(write=False)
    return found
