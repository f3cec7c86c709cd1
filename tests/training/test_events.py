"""TensorBoard events, read back by TensorBoard itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from assay.models.text_to_image import text_to_image_sizes
from assay.training import events
from assay.training.session import run_pairs
from tests.training.small import IMAGES, control_study, rows_of


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: sorted((e.step, e.value) for e in found.Scalars(tag)) for tag in found.Tags()["scalars"]}


def test_every_curve_is_there_once_however_often_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(text_to_image_sizes, "dot", IMAGES)
    while not run_pairs(control_study(), tmp_path, "cpu", seconds=0, tensorboard=True).finished:
        pass
    rows = sorted((row for row in rows_of(tmp_path) if row["layer"] == ""), key=lambda row: row["step"])
    board = tmp_path / "tensorboard" / "seed-0"
    assert {path.name for path in board.iterdir()} == {
        "base", "again", "fp16", "fp32", "like fp16", "pair null", "pair low", "pair skipped",
    }  # fmt: skip
    found = scalars(board / "fp16")
    for tag, column in (("loss", "loss"), ("held-out loss", "held_out"), ("loss scale", "scale")):
        steps = [(r["step"], r[column]) for r in rows if r["arm"] == "fp16" and r["kind"] == "run" and r[column]]
        assert [step for step, _ in found[tag]] == [step for step, _ in steps]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in steps], rel=1e-6)
    found = scalars(board / "pair low")
    for kind in ("weights", "gradients", "optimizer", "activations"):
        expected = [row["w1"] for row in rows if row["pair"] == "low" and row["kind"] == kind]
        assert [value for _, value in found[f"{kind}/W1"]] == pytest.approx(expected, rel=1e-6)


def test_names_stay_in_their_folder(tmp_path: Path) -> None:
    written = events.Events(tmp_path / "board")
    row = {"layer": "", "pair": None, "arm": "../../up", "seed": 0, "kind": "run", "step": 1}
    written.add(row | {"loss": 1.0, "held_out": None, "grad_norm": 1.0, "scale": 1.0, "skipped": 0})
    written.flush()
    assert [path.parent.parent.parent for path in tmp_path.rglob("events*")] == [tmp_path / "board"]


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'assay\[tensorboard\]'"):
        run_pairs(control_study(), tmp_path, "cpu", tensorboard=True)
