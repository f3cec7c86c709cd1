from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.bench.tune import Task, candidates, merged, tasks
from assay.flash.call import Call
from assay.flash.numerics import NAMES, Numerics
from assay.flash.tuning import KERNELS, Tile, file_name, folder, tile_for, trying


def test_every_row_of_the_table_is_a_task() -> None:
    found = {(task.kernel, task.row, task.dim) for task in tasks()}
    assert len(found) == len(tasks())
    assert {kernel for kernel, _, _ in found} == set(KERNELS)
    assert not any(kernel == "backward_kv" and dim > 128 for kernel, _, dim in found)
    assert not any(kernel in ("backward_k", "backward_v") and dim <= 128 for kernel, _, dim in found)


@pytest.mark.parametrize("task", tasks(), ids=str)
def test_there_is_something_to_try(task: Task) -> None:
    tiles = list(candidates(task))
    assert len(tiles) >= 6
    assert len(set(tiles)) == len(tiles)


def test_a_table_is_written_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    first = Task(kernel="forward", bits=16, masked=False, dim=128)
    path.write_text(merged(path, "Some GPU", {first: Tile(64, 64, 4, 3)}))
    second = Task(kernel="forward", bits=16, masked=False, dim=64)
    document = json.loads(merged(path, "Some GPU", {second: Tile(128, 32, 8, 2, False)}))
    assert document["device"] == "Some GPU"
    assert document["tiles"]["forward"]["16 bit full"] == {"64": [128, 32, 8, 2, False], "128": [64, 64, 4, 3]}


@pytest.mark.parametrize("path", sorted(folder().glob("*.json")), ids=lambda path: path.name)
def test_the_tables_hold_tiles(path: Path) -> None:
    document = json.loads(path.read_text())
    assert path.name == file_name(document["device"])
    for kernel, rows in document["tiles"].items():
        assert kernel in KERNELS
        for dims in rows.values():
            assert list(dims) == sorted(dims, key=int)
            for rows_, columns, warps, stages, *_ in dims.values():
                assert all(size & (size - 1) == 0 and 16 <= size <= 256 for size in (rows_, columns))
                assert warps in (4, 8)
                assert 1 <= stages <= 5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [16, 59, 64, 100, 256])
def test_an_unknown_gpu_has_a_tile_for_everything(kernel: str, dtype: torch.dtype, dim: int) -> None:
    q = torch.empty(1, 1, 8, dim, dtype=dtype)
    for right in (None, 0):
        tile = tile_for(kernel, Call(q=q, k=q, v=q, scale=1.0, right=right))
        assert tile.rows * tile.columns <= 64 * 64


def test_trying_a_tile_ends() -> None:
    q = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)
    call = Call(q=q, k=q, v=q, scale=1.0)
    before = tile_for("forward", call)
    with trying({"forward": Tile(16, 16, 4, 1)}):
        assert tile_for("forward", call) == Tile(16, 16, 4, 1)
    assert tile_for("forward", call) == before


@pytest.mark.parametrize(
    ("numerics", "kernel"),
    [
        (Numerics(), "forward"),
        (Numerics(probabilities="bf16", row_sum="fp16", rescale="bf16"), "forward"),
        (Numerics(probabilities="fp16"), "forward_wide"),
        (Numerics(probabilities="fp32"), "forward_wide"),
        (Numerics(output_accumulator="bf16"), "forward_held"),
        (Numerics(probabilities="fp32", output_accumulator="fp16"), "forward_held"),
    ],
)
def test_knobs_that_have_tiles_of_their_own(numerics: Numerics, kernel: str) -> None:
    """Where a table has none for them, they take the forward's."""
    q = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)
    call = Call(q=q, k=q, v=q, scale=1.0, numerics=numerics)
    assert tile_for("forward", call) == tile_for("forward", replace(call, numerics=Numerics()))
    with trying({kernel: Tile(16, 16, 4, 1)}):
        assert tile_for("forward", call) == Tile(16, 16, 4, 1)


def test_pieces_of_p() -> None:
    wide = {dtype: [Numerics(probabilities=name).pieces(dtype) for name in NAMES.values()] for dtype in NAMES}
    assert wide == {torch.bfloat16: [1, 2, 2], torch.float16: [1, 1, 2], torch.float32: [1, 1, 1]}
    assert all(Numerics().pieces(dtype) == 1 for dtype in NAMES)
