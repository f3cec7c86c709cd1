"""What makes two equal trainings equal bit by bit: deterministic kernels, and randomness by seed and step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch takes kernels that give the same bits every time, or raises where it has none.

    And one thread: sums over several depend on their number, and small models are faster with one.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it, before its first call
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # nothing reads it, and filling takes time
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill


def mixed(*parts: int | str) -> int:
    """One seed out of several: of the same parts always the same, on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """On the CPU, so that all devices get the same numbers."""
    return torch.Generator().manual_seed(mixed(*parts))
