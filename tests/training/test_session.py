"""Studies of pairs from beginning to end: nulls, kills, slices, lockstep and apart, arms that diverge."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from assay.models.text_to_image import text_to_image_sizes
from assay.training import snapshots
from assay.training.observation import KINDS
from assay.training.run import Run
from assay.training.session import Outcome, run_pairs
from assay.training.training import Pair, PairStudy
from tests.training.small import (
    BASE,
    IMAGES,
    SKIPPING,
    TEXT,
    control_study,
    digests,
    figures,
    rows_of,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the control study, never interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(text_to_image_sizes, "dot", IMAGES)
        assert run_pairs(control_study(), folder, "cpu", recipe="mine") == (True, {}, False)
    return folder


def test_a_study_has_all_its_rows(finished: Path) -> None:
    rows = rows_of(finished)
    runs = [row for row in rows if row["kind"] == "run"]
    assert [(row["step"], row["arm"]) for row in runs] == [
        (step, arm) for step in range(1, 7) for arm in ("base", "again", "fp16", "fp32", "like fp16")
    ]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in runs)
    compared = [1, 2, 4, 6]
    assert [row["step"] for row in runs if row["arm"] == "base" and row["held_out"] is not None] == compared
    whole = [row for row in rows if row["pair"] is not None and row["layer"] == ""]
    assert sorted((row["pair"], row["step"], row["kind"]) for row in whole) == sorted(
        (pair, step, kind) for pair in ("null", "low", "skipped") for step in compared for kind in KINDS
    )
    assert {row["recipe"] for row in rows} == {"mine"}


def test_the_null_pair_is_exactly_0(finished: Path) -> None:
    null = [row for row in rows_of(finished) if row["pair"] == "null"]
    assert {(row["step"], row["kind"]) for row in null} == {(step, kind) for step in (1, 2, 4, 6) for kind in KINDS}
    assert {(row["max"], row["rmse"], row["w1"]) for row in null} == {(0.0, 0.0, 0.0)}
    assert {(row["changed"], row["changed_from"], row["changed_to"]) for row in null} == {("", "", "")}


def test_another_precision_is_not_0(finished: Path) -> None:
    low = [row for row in rows_of(finished) if row["pair"] == "low" and row["step"] == 6 and row["layer"] == ""]
    assert {row["kind"] for row in low} == set(KINDS)
    assert all(0 < row["max"] < 1 and 0 < row["w1"] <= row["rmse"] * 1.0001 for row in low)
    assert {(row["changed"], row["changed_from"], row["changed_to"]) for row in low} == {("precision", "bf16", "fp16")}


def killed(folder: Path, place: str) -> None:
    command = [sys.executable, "-m", "tests.training.worker", str(folder), place]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_killed_and_resumed_it_ends_with_the_same_bits(finished: Path, tmp_path: Path) -> None:
    killed(tmp_path, "between saves")
    (save,) = tmp_path.glob("checkpoints/seed-0/step-*")
    assert save.name == "step-2"
    assert {row["step"] for row in rows_of(tmp_path) if row["kind"] == "run"} == {1, 2, 3, 4, 5}
    killed(tmp_path, "in a save")
    assert {path.name.split("-")[0] for path in save.parent.iterdir()} == {"step", ".new"}
    assert run_pairs(control_study(), tmp_path, "cpu", recipe="mine").finished
    assert digests(tmp_path) == digests(finished)
    assert not save.parent.exists()
    mine, theirs = figures(rows_of(tmp_path)), figures(rows_of(finished))
    for row in mine.values():
        row["recipe"] = "'mine'"  # the worker gave none
    assert mine == theirs


def test_slices_end_with_the_same_bits(finished: Path, tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    while not outcomes or not outcomes[-1].finished:
        outcomes.append(run_pairs(control_study(), tmp_path, "cpu", recipe="mine", seconds=0))
        assert len(outcomes) <= 6
    assert [outcome.finished for outcome in outcomes] == [False] * 5 + [True]
    assert digests(tmp_path) == digests(finished)
    assert figures(rows_of(tmp_path)) == figures(rows_of(finished))


def test_what_is_done_is_not_done_again(finished: Path) -> None:
    files = [*finished.glob("*.jsonl"), *finished.glob("ended/*"), *finished.glob("samples/**/*")]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert len(before) > 5
    told: list[int] = []
    outcome = run_pairs(control_study(), finished, "cpu", tell=lambda done, words: told.append(done))
    assert outcome.finished
    assert told == [30]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_apart_gives_the_same_rows(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "fits", lambda trainings, device: False)
    told: list[int] = []

    def run(seconds: float | None) -> Outcome:
        return run_pairs(
            control_study(),
            tmp_path,
            "cpu",
            recipe="mine",
            seconds=seconds,
            tell=lambda done, words: told.append(done),
        )

    assert run(0) == (False, {}, True)
    assert run(None) == (True, {}, True)
    assert told == [0, 1, *range(1, 31)]
    assert figures(rows_of(tmp_path)) == figures(rows_of(finished))


def test_every_seed_is_its_own_and_another_study_is_refused(tmp_path: Path) -> None:
    study = PairStudy(
        asked="",
        trainings={"a": replace(BASE, steps=2), "b": replace(BASE, steps=2, attention="sdpa")},
        pairs=(Pair(name="sdpa", arm="b", reference="a"),),
        seeds=(0, 1),
        every=1,
    )
    told: list[int] = []
    assert not run_pairs(study, tmp_path, "cpu", seconds=0, tell=lambda done, words: told.append(done)).finished
    assert told == [0, 1, 2]  # time ran out in the first seed: the second has not begun
    assert run_pairs(study, tmp_path, "cpu", tell=lambda done, words: told.append(done)).finished
    assert told == [0, 1, 2, *range(2, 9)]
    losses = {row["seed"]: row["loss"] for row in rows_of(tmp_path) if row["arm"] == "a" and row["step"] == 2}
    assert losses[0] != losses[1]
    other = replace(study, trainings={n: replace(t, learning_rate=1e-4) for n, t in study.trainings.items()})
    rows = figures(rows_of(tmp_path))
    with pytest.raises(ValueError, match=r"seed-0.json is of other trainings .* --out"):
        run_pairs(other, tmp_path, "cpu")
    assert figures(rows_of(tmp_path)) == rows


def test_seeds_in_processes_of_their_own_give_the_same_rows(tmp_path: Path) -> None:
    base = replace(TEXT, size="300k", steps=2, batch=2)  # a size that a worker knows
    study = PairStudy(
        asked="",
        trainings={"base": base, "again": base},
        pairs=(Pair(name="null", arm="again", reference="base", several=True),),
        seeds=(0, 1),
        every=1,
    )
    told: list[int] = []
    for jobs in (1, 2):
        outcome = run_pairs(study, tmp_path / str(jobs), "cpu", jobs=jobs, tell=lambda done, words: told.append(done))
        assert outcome == (True, {}, False)
        assert told[-1] == 8
    assert figures(rows_of(tmp_path / "2")) == figures(rows_of(tmp_path / "1"))
    assert digests(tmp_path / "2") == digests(tmp_path / "1")


def breaks_at(step: int) -> Callable[[nn.Module], None]:
    """Makes a model whose second block gives NaN from the given step on, counted from 0."""

    def change(model: nn.Module) -> None:
        seen = {"steps": 0}

        def begin(module: nn.Module, given: object) -> None:
            seen["steps"] += module.training and torch.is_grad_enabled()

        def spoil(module: nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
            return output * math.nan if seen["steps"] > step else output

        model.register_forward_pre_hook(begin)
        model.get_submodule("blocks.1.mlp").register_forward_hook(spoil)

    return change


@pytest.mark.parametrize("apart", [False, True])
def test_a_nan_stops_only_its_arm(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "fits", lambda trainings, device: not apart)
    base = replace(TEXT, steps=4, precision="fp32")
    broken = replace(base, change=breaks_at(2))
    study = PairStudy(
        asked="",
        trainings={"base": base, "broken": broken, "sdpa": replace(base, attention="sdpa")},
        pairs=(Pair(name="broken", arm="broken", reference="base"), Pair(name="sdpa", arm="sdpa", reference="base")),
        seeds=(0,),
        every=1,
    )
    outcome = run_pairs(study, tmp_path, "cpu")
    assert outcome == (
        True,
        {"broken, seed 0": "its loss was nan at step 3; it began in blocks.1.mlp"},
        apart,
    )
    rows = rows_of(tmp_path)
    steps = {
        name: [row["step"] for row in rows if row["kind"] == "run" and row["arm"] == name] for name in study.trainings
    }
    assert steps == {"base": [1, 2, 3, 4], "broken": [1, 2], "sdpa": [1, 2, 3, 4]}
    for pair, last in (("broken", 2), ("sdpa", 4)):
        found = [row for row in rows if row["pair"] == pair and row["layer"] == "" and row["kind"] == "weights"]
        assert [row["step"] for row in found] == list(range(1, last + 1))
        assert all(math.isfinite(row["max"]) for row in found)


def test_a_finished_study_still_says_who_was_stopped(tmp_path: Path) -> None:
    base = replace(TEXT, steps=3, precision="fp32")
    trainings = {"base": base, "broken": replace(base, change=_nan_weights)}
    study = PairStudy(
        asked="", trainings=trainings, pairs=(Pair(name="p", arm="broken", reference="base"),), seeds=(0,)
    )
    first = run_pairs(study, tmp_path, "cpu")
    assert first.stopped == {
        "broken, seed 0": "its loss was nan at step 1; the weights blocks.0.mlp.down.weight were not finite already"
    }
    assert run_pairs(study, tmp_path, "cpu") == first
    alone = replace(study, trainings={"a": trainings["broken"], "b": trainings["broken"]}, pairs=(
        Pair(name="null", arm="a", reference="b", several=True),
    ))  # fmt: skip
    both = run_pairs(alone, tmp_path / "both", "cpu")
    assert both.finished
    assert list(both.stopped) == ["a, seed 0", "b, seed 0"]
    assert rows_of(tmp_path / "both") == []


def _nan_weights(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.down.weight")[0, 0] = math.nan


@pytest.mark.parametrize("apart", [False, True])
def test_skipped_steps_are_copied_exactly(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "fits", lambda trainings, device: not apart)
    base = replace(BASE, steps=8, learning_rate=1e-2)
    study = PairStudy(
        asked="",
        # Whoever skips like another may stand before it.
        trainings={
            "control": replace(base, precision="fp32", skips_like="low"),
            "low": replace(base, precision=SKIPPING),
            "fp32": replace(base, precision="fp32"),
        },
        pairs=(Pair(name="skipped", arm="control", reference="fp32"),),
        seeds=(0,),
        every=8,
    )
    assert run_pairs(study, tmp_path, "cpu").finished
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "run"]
    skipped = {name: [row["skipped"] for row in rows if row["arm"] == name] for name in study.trainings}
    assert skipped["control"] == skipped["low"]
    assert 0 < skipped["low"][-1] < 8
    assert skipped["fp32"] == [0] * 8
    (weights,) = (
        row for row in rows_of(tmp_path) if row["kind"] == "weights" and row["layer"] == "" and row["step"] == 8
    )
    assert weights["max"] > 0


def test_arms_see_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[list[bytes]]] = {}
    real = Run.on_device

    def spy(run: Run, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        key = f"{run.training.attention} {run.training.init_seed} {run.training.order_seed}"
        seen.setdefault(key, []).append([x.numpy().tobytes() for x in batch])
        return real(run, batch)

    monkeypatch.setattr(Run, "on_device", spy)
    base = replace(BASE, steps=3)
    study = PairStudy(
        asked="",
        trainings={
            "base": base,
            "sdpa": replace(base, attention="sdpa"),
            "init": replace(base, init_seed=1),
            "order": replace(base, order_seed=1),
        },
        pairs=tuple(Pair(name=name, arm=name, reference="base") for name in ("sdpa", "init", "order")),
        seeds=(0,),
    )
    run_pairs(study, tmp_path, "cpu")
    assert seen["standard 0 0"] == seen["sdpa 0 0"] == seen["standard 1 0"]
    images, noise = 0, 2
    assert seen["standard 0 1"][0][images] != seen["standard 0 0"][0][images]
    assert seen["standard 0 1"][0][noise] == seen["standard 0 0"][0][noise]


def test_progress_is_told_in_words_that_a_bar_can_show(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    study = control_study(replace(BASE, steps=1))
    run_pairs(study, tmp_path, "cpu", tell=lambda *what: told.append(what))
    assert told[0] == (0, "")
    assert [(done, words.split(":")[0]) for done, words in told[1:]] == [
        (done, name) for done, name in enumerate(study.trainings, start=1)
    ]
    assert all(re.fullmatch(r".+: loss \d\.\d{3}, \d+\.\d steps/s", words) for _, words in told[1:])
