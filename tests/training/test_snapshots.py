"""Observations on disk, and whether trainings fit into memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from assay.training import snapshots
from assay.training.observation import KINDS, observe
from tests.training.small import BASE, TEXT, assert_same_bits, new_run, trained


def test_an_observation_comes_back(tmp_path: Path) -> None:
    _, seen = observe(trained(TEXT, steps=1))
    seen["weights"]["turned"] = torch.arange(6.0).reshape(2, 3).t()
    snapshots.save(tmp_path, "an arm: 1/2", 3, seen)
    found = snapshots.load(tmp_path, "an arm: 1/2", 3)
    assert found is not None
    for kind in KINDS:
        assert_same_bits(found[kind], {name: x.contiguous() for name, x in seen[kind].items()})
    assert snapshots.load(tmp_path, "an arm: 1/2", 4) is None
    assert snapshots.load(tmp_path, "an arm, 1/2", 3) is None
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".safetensors"]


def test_half_a_snapshot_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no room"):
        snapshots.save(tmp_path, "arm", 1, {kind: {"x": torch.ones(2)} for kind in KINDS})
    assert snapshots.load(tmp_path, "arm", 1) is None


def test_skipped_steps_come_back(tmp_path: Path) -> None:
    assert snapshots.load_skips(tmp_path, "arm") == []
    snapshots.save_skips(tmp_path, "arm", [0, 3])
    snapshots.save_skips(tmp_path, "arm", [0, 3, 4])
    assert snapshots.load_skips(tmp_path, "arm") == [0, 3, 4]
    assert snapshots.load_skips(tmp_path, "another") == []


def test_names_as_files() -> None:
    names = ["a b", "a_b", "a/b", "../a", "ä", "", "x" * 300, "x" * 301, "A b"]
    safe = [snapshots.safe_name(name) for name in names]
    assert len({name.lower() for name in safe}) == len(names)
    assert all(len(name) < 80 and "/" not in name and "." not in name for name in safe)


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = {"a": BASE, "b": BASE}
    parameters = sum(p.numel() for p in new_run(BASE).model.parameters())
    needed = 2 * parameters * (4 + 4 + 8 + 4)
    cpu = torch.device("cpu")
    assert snapshots.fits(trainings, cpu)
    for free, fits in ((int(needed / 0.6) + 1, True), (int(needed / 0.6) - 1, False)):
        monkeypatch.setattr(snapshots, "_free", lambda device, free=free: free)
        assert snapshots.fits(trainings, cpu) is fits


def test_free_memory_is_what_the_system_says() -> None:
    free = snapshots._free(torch.device("cpu"))
    assert 0 < free < 2**50
