"""Which tile a kernel takes: from a table, measured once on each kind of GPU by `assay bench tune`.

A tile depends on the kernel, the size of a number, the head dimension and whether there is a mask; never on the batch
or on the lengths, so that a sequence has the same bits whatever stands beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from assay.flash.call import Call
from assay.flash.numerics import Numerics

KERNELS = (
    "forward",
    "forward_wide",
    "forward_held",
    "backward_kv",
    "backward_k",
    "backward_v",
    "backward_q",
    "backward_bias",
)
"""Two of the forward's knobs need registers of their own: a P that is wider than V enters its product twice, and an
output that is held in 16 bits takes in a product that was summed up apart."""


class Tile(NamedTuple):
    """How a kernel cuts its work."""

    rows: int
    columns: int
    """Keys."""
    warps: int
    stages: int
    """How many blocks are being loaded at once."""
    split: bool = True
    """Backward: whether blocks that need no mask have a loop of their own."""


_TRIED: dict[str, Tile] = {}


@contextmanager
def trying(tiles: dict[str, Tile]) -> Iterator[None]:
    """Inside, these kernels take these tiles, in all threads: for tuning and for tests."""
    before = dict(_TRIED)
    _TRIED.update(tiles)
    try:
        yield
    finally:
        _TRIED.clear()
        _TRIED.update(before)


def is_trying() -> bool:
    """Whether tiles are not those of the table."""
    return bool(_TRIED)


def tile_for(kernel: str, call: Call) -> Tile:
    """The tile that `kernel` takes for this call."""
    if kernel == "forward":
        kernel = _forward_of(call.numerics, call.v.dtype)
    if kernel in _TRIED:
        return _TRIED[kernel]
    device = _name(call.q.device.index) if call.q.is_cuda else "default"
    masked = call.left is not None or call.right is not None
    dim = max(call.q.shape[3], call.v.shape[3])
    tile = _tile(device, kernel, call.q.element_size() * 8, dim, masked)
    if call.numerics.block is not None and kernel.startswith("forward"):
        rows, columns = call.numerics.block
        return Tile(rows, columns, 8 if rows * max(columns, dim) > 64 * 128 else 4, 2)
    bent, leaning = call.softcap is not None, call.slopes is not None
    crowded = {"backward_kv": bent or leaning, "backward_q": bent}
    if crowded.get(kernel) and tile.rows > 16 * tile.warps:  # softcap and ALiBi need registers too
        return tile._replace(rows=64, stages=3)
    if call.bias is not None and dim > 128:  # it has blocks too, and shared memory is full
        return tile._replace(stages=1)
    return tile


@cache
def _forward_of(numerics: Numerics, dtype: torch.dtype) -> str:
    if numerics.output_accumulator != "fp32":
        return "forward_held"
    return "forward_wide" if numerics.pieces(dtype) > 1 else "forward"


@cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@cache
def _tile(device: str, kernel: str, bits: int, dim: int, masked: bool) -> Tile:
    """The first row whose head dimension is large enough; the default's, for what was never measured."""
    mask = "masked" if masked else "full"
    kinds = (kernel, "forward") if kernel.startswith("forward") else (kernel,)
    for table, kind in product((_table(device), _table("default")), kinds):
        for largest, tile in table.get(kind, {}).get(f"{bits} bit {mask}", {}).items():
            if dim <= int(largest):
                rows, columns, warps, stages, *split = tile
                return Tile(rows, columns, warps, stages, *map(bool, split))
    raise AssertionError(f"the default table has no tile for {kernel}, {bits} bit, {mask}, {dim}")


@cache
def _table(device: str) -> dict[str, dict[str, dict[str, list[int]]]]:
    """Kernel → size of a number and mask → largest head dimension → tile. Empty for a GPU without a table."""
    path = folder() / file_name(device)
    if not path.is_file():
        return {}
    table: dict[str, dict[str, dict[str, list[int]]]] = json.loads(path.read_text(encoding="utf-8"))["tiles"]
    return table


def folder() -> Path:
    """Where the tables are."""
    return Path(__file__).parent / "tiles"


def file_name(device: str) -> str:
    """Of a GPU's table: "NVIDIA H200" → "nvidia_h200.json"."""
    return "".join(c if c.isalnum() else "_" for c in device.lower()) + ".json"
