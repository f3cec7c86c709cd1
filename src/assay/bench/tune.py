"""Finds the tile of every kernel on this GPU by timing, and writes the table that `flash_attention` reads."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from assay.bench.timing import cuda_clock
from assay.flash.call import Call
from assay.flash.numerics import Numerics
from assay.flash.tuning import KERNELS, Tile, trying

DIMS = (64, 128, 256)
_TOKENS, _HIDDEN, _LENGTH = 16384, 2048, 4096
_ROUNDS = 3


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
    """Every row that is measured. Large heads sum dK and dV up one after the other, others both at once."""
    found = []
    for kernel, bits, masked, dim in product(kernels, (16, 32), (False, True), dims):
        apart = kernel in ("backward_k", "backward_v")
        if (kernel == "backward_kv" and dim > 128) or (apart and dim <= 128):
            continue
        found.append(Task(kernel=kernel, bits=bits, masked=masked, dim=dim))
    return found


def candidates(task: Task) -> Iterator[Tile]:
    """Tiles that registers and shared memory may hold. What does not fit after all fails, and is skipped."""
    sizes = (32, 64, 128) if task.bits == 16 else (16, 32, 64)
    for rows, columns, stages in product(sizes, sizes, (1, 2, 3)):
        for warps in (4, 8):
            area = rows * columns
            largest = 64 * 128 if warps == 4 else 128 * 128
            if area > largest or area * 4 < largest or (stages == 1 and task.bits == 16 and task.dim < 256):
                continue
            yield Tile(rows, columns, warps, stages, task.dim < 256 or task.kernel == "forward")


def measure(task: Task) -> tuple[Tile, float] | None:
    """The fastest tile and its seconds; None if none runs."""
    call, work = _work(task)
    found: list[tuple[float, Tile]] = []
    for tile in candidates(task):
        with trying({task.kernel: tile}):
            try:
                work()
                calls = max(1, min(10, round(0.02 / max(cuda_clock(work, 1), 1e-6))))
                times = [cuda_clock(work, calls) for _ in range(_ROUNDS)]
            except Exception as error:  # a tile that does not fit this GPU: each backend has its own way of saying so
                if "CUDA error" in str(error):
                    raise
                continue
        found.append((statistics.median(times), tile))
    del call
    if not found:
        return None
    seconds, tile = min(found)
    return tile, seconds


def merged(path: Path, device: str, found: dict[Task, Tile]) -> str:
    """The file: a line for each kernel, size of a number and mask. What was there and not measured again stays."""
    tiles: dict[str, dict[str, dict[str, list[Any]]]] = {}
    if path.is_file():
        tiles = json.loads(path.read_text(encoding="utf-8"))["tiles"]
    for task, tile in found.items():
        row = tiles.setdefault(task.kernel, {}).setdefault(task.row, {})
        row[str(task.dim)] = list(tile) if not tile.split else list(tile[:4])
        tiles[task.kernel][task.row] = dict(sorted(row.items(), key=lambda item: int(item[0])))
    kernels = []
    for kernel, rows in tiles.items():
        lines = ",\n".join(f"      {json.dumps(row)}: {json.dumps(dims)}" for row, dims in rows.items())
        kernels.append(f"    {json.dumps(kernel)}: {{\n{lines}\n    }}")
    body = ",\n".join(kernels)
    return f'{{\n  "device": {json.dumps(device)},\n  "made": "assay bench tune",\n  "tiles": {{\n{body}\n  }}\n}}\n'


def _work(task: Task) -> tuple[Call, Any]:
    """A call of the kernel's own pass on random data."""
    from assay.flash import launch

    dtype = torch.bfloat16 if task.bits == 16 else torch.float32
    tokens = _TOKENS if task.bits == 16 else _TOKENS // 8
    length = min(_LENGTH, tokens)
    shape = (tokens // length, _HIDDEN // task.dim, length, task.dim)
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4))
    call = Call(q=q, k=k, v=v, scale=task.dim**-0.5, right=0 if task.masked else None)
    if task.kernel == "forward":
        call = replace(call, numerics=Numerics(sum_after_cast=True))  # the Hopper kernel has no table
        return call, lambda: launch.forward(call)
    if task.kernel == "backward_bias":
        call = replace(call, bias=torch.randn(1, shape[1], length, length, dtype=dtype, device="cuda"))
    out, lse = launch.forward(call)
    return call, lambda: launch.backward(call, out, lse, dout, None, task.kernel == "backward_bias")
