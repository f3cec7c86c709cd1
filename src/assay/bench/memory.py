"""How much memory a call takes, and whether there is enough of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from assay.bench.contenders import Contender
from assay.bench.shapes import Pass, Shape

_MATRICES: dict[Pass, float] = {"forward": 2.5, "forward+backward": 3.1}
"""Matrices of scores held at the peak: scores and probabilities, dP with them in backward; as measured."""
_USABLE = 0.9
"""Share of the free memory that is counted on: allocators waste some."""


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on `device`; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return None


def too_large(contender: Contender, shape: Shape, which: Pass, dtype: torch.dtype, free: int | None) -> str | None:
    """Why the contender's matrix of scores would not fit into `free` bytes; None where it does."""
    if contender.score_bytes == 0 or free is None:
        return None
    needed = _MATRICES[which] * shape.scores * max(dtype.itemsize, contender.score_bytes)
    if needed <= _USABLE * free:
        return None
    return f"skipped: its {shape.queries}×{shape.keys} matrices need {in_units(needed)}, {in_units(free)} are free"


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """What one call allocates at its peak, above what is there before it; None on the CPU, which does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return int(torch.cuda.max_memory_allocated(device)) - before


def let_go(device: torch.device) -> None:
    """Give back what a failed or finished call left behind."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # of a GPU that an earlier call broke; what comes next says so
            torch.cuda.empty_cache()


def in_units(size: float) -> str:
    """As people read it: 26 GiB, 4.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
