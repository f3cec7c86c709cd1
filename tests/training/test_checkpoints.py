"""Checkpoints: whole or not at all, of one study, and never unpickled."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from assay.training import checkpoints
from assay.training.run import Run
from tests.training.small import BASE, assert_same_bits, new_run, state, trained


def runs(steps: int = 2) -> dict[str, Run]:
    return {"a": trained(BASE, steps), "b/ä": trained(replace(BASE, precision="fp16"), steps)}


def fresh() -> dict[str, Run]:
    return {"a": new_run(BASE), "b/ä": new_run(replace(BASE, precision="fp16"))}


def test_everything_comes_back(tmp_path: Path) -> None:
    saved, loaded = runs(), fresh()
    assert checkpoints.load(tmp_path / "none", loaded, "mine") is False
    checkpoints.save(tmp_path, saved, "mine")
    assert checkpoints.load(tmp_path, loaded, "mine") is True
    for name, run in saved.items():
        assert_same_bits(state(loaded[name]), state(run))
        assert loaded[name].numbers() == run.numbers()
    kinds = {name.split(" ")[0] for name in state(saved["a"])}
    assert kinds == {"weights", "average", "optimizer"}
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}


def test_another_study_is_refused(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, runs(1), "mine")
    loaded = fresh()
    before = {name: state(run) for name, run in loaded.items()}
    for wrong in ({"identity": "yours"}, {"runs": {"a": loaded["a"]}}, {"runs": dict(reversed(loaded.items()))}):
        given = {"runs": loaded, "identity": "mine", **wrong}
        with pytest.raises(ValueError, match="step-1 is of other trainings"):
            checkpoints.load(tmp_path, given["runs"], given["identity"])  # type: ignore[arg-type]
    for name, run in loaded.items():
        assert_same_bits(state(run), before[name])
        assert run.step == 0


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = runs(1)
    checkpoints.save(tmp_path, saved, "mine")
    first = {name: state(run) for name, run in saved.items()}
    for run in saved.values():
        run.advance()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _full)
        with pytest.raises(OSError, match="no room"):
            checkpoints.save(tmp_path, saved, "mine")
    loaded = fresh()
    checkpoints.load(tmp_path, loaded, "mine")
    for name, run in loaded.items():
        assert_same_bits(state(run), first[name])
    checkpoints.save(tmp_path, saved, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def _full(*paths: object) -> None:
    raise OSError("no room")


def test_the_latest_of_two_is_taken(tmp_path: Path) -> None:
    """As a kill leaves them: the new one in its place, the old one not yet gone. Step 10 comes after 9."""
    saved = runs(1)
    for step in (9, 10):
        saved["a"].step = step
        checkpoints.save(tmp_path / str(step), saved, "mine")
        os.replace(tmp_path / str(step) / f"step-{step}", tmp_path / f"step-{step}")
    loaded = fresh()
    checkpoints.load(tmp_path, loaded, "mine")
    assert loaded["a"].step == 10


def test_numbers_are_plain_json(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, runs(1), "mine")
    found = json.loads((tmp_path / "step-1" / "numbers.json").read_text(encoding="utf-8"))
    assert found["runs"]["b/ä"]["scaling"]["scale"] == 65536.0
    assert found["runs"]["a"] == {"step": 1, "skipped": [], "scaling": {}}
