"""Finds the tile of every kernel on this GPU by timing, and writes the table that `flash_attention` reads."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from assay.bench.timing import Work, cuda_clock
from assay.flash.call import Call
from assay.flash.numerics import Numerics
from assay.flash.tuning import KERNELS, Tile, trying

DIMS = (64, 128, 256)
_TOKENS, _HIDDEN, _LENGTH = 16384, 2048, 4096
_ROUNDS = 3
KNOBS = {
    "forward": Numerics(reverse_keys=True),  # without it Hopper's own kernel runs, which has no table
    "forward_wide": Numerics(probabilities="fp32"),
    "forward_held": Numerics(output_accumulator="bf16"),
}
"""What calls a kernel of the forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One row of the table: the tile of a kernel for numbers of so many bits, with or without a mask."""

    kernel: str
    bits: int
    masked: bool
    dim: int

    @property
    def row(self) -> str:
        """As the table names it."""
        return f"{self.bits} bit {'masked' if self.masked else 'full'}"


def tasks(kernels: tuple[str, ...] = KERNELS, dims: tuple[int, ...] = DIMS) -> list[Task]:
    """Every row that is measured. Large heads sum dK and dV up one after the other, others both at once; knobs are for
    16 bits.
    """
    found = []
    for kernel, bits, masked, dim in product(kernels, (16, 32), (False, True), dims):
        apart = kernel in ("backward_k", "backward_v")
        if (
            (kernel == "backward_kv" and dim > 128)
            or (apart and dim <= 128)
            or (kernel in ("forward_wide", "forward_held") and bits == 32)
        ):
            continue
        found.append(Task(kernel=kernel, bits=bits, masked=masked, dim=dim))
    return found


def candidates(task: Task) -> Iterator[Tile]:
    """Tiles worth trying: of those that registers and shared memory may hold, those that ever came near the front."""
    split = task.dim < 256 or task.kernel in KNOBS
    if task.bits == 32:
        for rows, columns, warps in ((32, 32, 4), (64, 32, 4), (32, 64, 8), (64, 64, 8), (16, 32, 4), (16, 16, 4)):
            yield Tile(rows, columns, warps, 1, split)
        return
    small = ((64, 64, 4), (64, 32, 4), (32, 64, 4))
    large = ((64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 32, 8), (32, 128, 8))
    larger = ((128, 128, 8), (64, 64, 8), (64, 128, 8)) if task.kernel in KNOBS else ()
    for rows, columns, warps in small if task.kernel == "backward_bias" else small + large + larger:
        for stages in (2, 3):
            yield Tile(rows, columns, warps, stages, split)


def compile_all(wanted: Sequence[Task]) -> Iterator[Task]:
    """Every kernel with every candidate, on all cores, so that timing waits for no compiler. Yields what is done."""
    jobs = [(task, tile) for task in wanted for tile in candidates(task)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=context) as pool:
        for (task, _), _ in zip(jobs, pool.map(_compiles, jobs), strict=True):
            yield task


def count(wanted: Sequence[Task]) -> int:
    """How many candidates there are."""
    return sum(len(list(candidates(task))) for task in wanted)


def _compiles(job: tuple[Task, Tile]) -> bool:
    task, tile = job
    return _seconds(task, tile, _work(task, length=128), calls=1) is not None


def measure(task: Task) -> tuple[Tile, float] | None:
    """The fastest tile and its seconds; None if none runs."""
    work = _work(task)
    found = [(seconds, tile) for tile in candidates(task) if (seconds := _seconds(task, tile, work)) is not None]
    if not found:
        return None
    seconds, tile = min(found)
    return tile, seconds


def _seconds(task: Task, tile: Tile, work: Work, calls: int = 5) -> float | None:
    """Of one call with this tile; None if it does not fit this GPU, which each backend says in its own way."""
    with trying({task.kernel: tile}):
        try:
            work()
            return statistics.median(cuda_clock(work, calls) for _ in range(_ROUNDS))
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            return None


def merged(path: Path, device: str, found: dict[Task, Tile]) -> str:
    """The file: a line for each kernel, size of a number and mask. What was there and not measured again stays."""
    tiles: dict[str, dict[str, dict[str, list[Any]]]] = {}
    if path.is_file():
        try:
            tiles = json.loads(path.read_text(encoding="utf-8"))["tiles"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is there and is no table of tiles. Name another file.") from None
    for task, tile in found.items():
        row = tiles.setdefault(task.kernel, {}).setdefault(task.row, {})
        row[str(task.dim)] = list(tile) if not tile.split else list(tile[:4])
        tiles[task.kernel][task.row] = dict(sorted(row.items(), key=lambda item: int(item[0])))
    kernels = []
    for kernel, rows in sorted(tiles.items(), key=lambda item: KERNELS.index(item[0])):
        lines = ",\n".join(f"      {json.dumps(row)}: {json.dumps(dims)}" for row, dims in rows.items())
        kernels.append(f"    {json.dumps(kernel)}: {{\n{lines}\n    }}")
    body = ",\n".join(kernels)
    return f'{{\n  "device": {json.dumps(device)},\n  "made": "assay bench tune",\n  "tiles": {{\n{body}\n  }}\n}}\n'


def _work(task: Task, length: int = _LENGTH) -> Work:
    """A call of the kernel's own pass on random data."""
    from assay.flash import launch

    dtype = torch.bfloat16 if task.bits == 16 else torch.float32
    tokens = _TOKENS if task.bits == 16 else _TOKENS // 8
    length = min(length, tokens)
    shape = (tokens // _LENGTH or 1, _HIDDEN // task.dim, length, task.dim)
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4))
    call = Call(q=q, k=k, v=v, scale=task.dim**-0.5, right=0 if task.masked else None)
    if task.kernel in KNOBS:
        call = replace(call, numerics=KNOBS[task.kernel])
        return lambda: launch.forward(call)
    if task.kernel == "backward_bias":
        call = replace(call, bias=torch.randn(1, shape[1], length, length, dtype=dtype, device="cuda"))
    out, lse = launch.forward(call)
    return lambda: launch.backward(call, out, lse, dout, None, task.kernel == "backward_bias")
