"""Random bits that depend on nothing but their names: numpy promises that these never change."""

from __future__ import annotations

import numpy as np


def bits(count: int, seed: int, *names: int) -> np.ndarray:
    """uint64 (count,): a stream of its own for each seed and each list of names."""
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}.")
    source = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=names))
    found: np.ndarray = source.random_raw(count)
    return found
