"""The sweeps on a GPU: the same figures as on the CPU, and the null."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from assay.results.lines import records_of
from assay.sweeps.grid import SWEEPS, default_sweep
from assay.sweeps.run import run_points

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_runs_and_its_null_is_zero(name: str, tmp_path: Path) -> None:
    small: dict[str, object] = {"seeds": 2, "inputs": ("normal",), "formats": ("bf16",)}
    small |= {"lengths": (64, 128)} if name == "length" else {"length": 128}
    small |= {"srams": (8192, 32_768)} if name == "blocks" else {}
    points = default_sweep(name, **small).points("cuda")
    rows = records_of(tmp_path, run_points(points, tmp_path, "cuda"))
    assert len(rows) == len(points)
    assert {row["device"] for row in rows} == {torch.cuda.get_device_name()}
    for row in rows:
        if row["variant"] == "flash":
            assert row["null_max"] == 0.0
        assert 0 < row["error_rmse"] < 1


def test_the_figures_are_those_of_the_cpu(tmp_path: Path) -> None:
    sweep = default_sweep("precision", length=512, seeds=2, formats=("bf16", "fp16"), inputs=("uniform", "normal"))
    found = []
    for device in ("cuda", "cpu"):
        points = [point for point in sweep.points(device) if point.variant == "flash"]  # CUDA has our kernels beside it
        found.append(records_of(tmp_path, run_points(points, tmp_path, device)))
    for there, here in zip(*found, strict=True):
        assert there["plan"] == here["plan"]
        for figure in ("error_rmse", "baseline_error_rmse"):
            assert there[figure] == pytest.approx(here[figure], rel=0.02)
