"""`assay pair` as a user runs it, with a recipe of their own on synthetic data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from assay.results.lines import all_records
from assay.results.record import Record
from assay.results.training_record import TRAINING
from tests.cli.test_cli import assay

RECIPE = """
from dataclasses import replace
from assay.models.text_to_image import TextToImageConfig, text_to_image_sizes
from assay.training import snapshots
from assay.training.training import Pair, PairStudy, Training

text_to_image_sizes["dot"] = TextToImageConfig(image=8, patch=4, words=64, caption=4, width=16, depth=1, heads=2)

def study(seeds=(0, 1), **changes):
    base = Training(size="dot", data="synthetic", image=8, steps=4, batch=4, warmup=1, **changes)
    trainings = {
        "base": base,
        "again": base,
        "flash": replace(base, attention="flash"),
        "other": replace(base, init_seed=1),
    }
    pairs = (
        Pair(name="null", arm="again", reference="base", several=True),
        Pair(name="flash", arm="flash", reference="base"),
        Pair(name="other initialisation", arm="other", reference="base"),
    )
    return PairStudy(asked="Why?", trainings=trainings, pairs=pairs, seeds=seeds, every=2)

def mine():
    return study()

def long():
    made = study(seeds=(0,))
    return replace(made, trainings={name: replace(t, steps=100_000) for name, t in made.trainings.items()})

def apart():
    snapshots.fits = lambda trainings, device: False
    return study(seeds=(0,))

def spoil(model):
    import torch
    with torch.no_grad():
        model.last.weight[0, 0] = torch.nan

def diverging():
    made = study(seeds=(0,))
    return replace(made, trainings=made.trainings | {"flash": replace(made.trainings["base"], change=spoil)})
"""
OPTIONS = ("--device", "cpu", "--jobs", "1")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "my recipe.py"
    path.write_text(RECIPE)
    return str(path)


def rows_in(folder: Path) -> list[Record]:
    return all_records(folder, TRAINING)


def figures(folder: Path) -> dict[str, Any]:
    return {row["id"]: (row["loss"], row["max"], row["w1"], row["rmse"]) for row in rows_in(folder)}


@pytest.mark.slow
def test_a_study_in_slices_and_at_once(recipe: str, tmp_path: Path) -> None:
    at_once = assay("pair", f"{recipe}:mine", "--out", str(tmp_path / "once"), *OPTIONS, "--json", "--tensorboard")
    assert at_once.returncode == 0, at_once.stderr
    assert list((tmp_path / "once" / "tensorboard").rglob("events*"))
    found = json.loads(at_once.stdout)
    assert [line["pair"] for line in found["pairs"]] == ["null", "flash", "other initialisation"]
    assert found["pairs"][0]["W1"] == found["pairs"][0]["max"] == "0 [0, 0]"
    assert found["pairs"][1]["W1"] not in ("–", "0 [0, 0]")
    assert [sentence.split(":")[0] for sentence in found["verdicts"]] == ["flash"]
    command = ("pair", f"{recipe}:mine", "--out", str(tmp_path / "slices"), *OPTIONS)
    slice = assay(*command, "--minutes", "0")
    assert slice.returncode == 0, slice.stderr
    assert "Time is up" in slice.stderr
    assert "Go on with: assay pair" in slice.stderr
    assert 0 < len(rows_in(tmp_path / "slices")) < len(rows_in(tmp_path / "once"))
    rest = assay(*command)
    assert rest.returncode == 0, rest.stderr
    assert "Time is up" not in rest.stderr
    assert "Weights at the end" in rest.stdout
    assert "flash: its weights drift" in rest.stdout or "flash: whether" in rest.stdout
    assert figures(tmp_path / "slices") == figures(tmp_path / "once")
    assert {row["recipe"] for row in rows_in(tmp_path / "once")} == {f"{recipe}:mine"}


def test_ctrl_c_says_how_to_go_on(recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "assay", "pair", f"{recipe}:long", "--out", str(folder), *OPTIONS],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not folder.is_dir() or not rows_in(folder):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Go on with: assay pair" in errors


@pytest.mark.slow
def test_an_arm_that_diverges_is_named(recipe: str, tmp_path: Path) -> None:
    done = assay("pair", f"{recipe}:diverging", "--out", str(tmp_path / "run"), *OPTIONS)
    assert done.returncode == 0, done.stderr
    says = "flash, seed 0 was stopped: its loss was nan at step 1; the weights last.weight were not finite already."
    assert says in " ".join(done.stderr.split())
    assert {row["step"] for row in rows_in(tmp_path / "run") if row["arm"] == "base"} == {1, 2, 3, 4}


@pytest.mark.slow
def test_apart_is_said_and_another_study_in_the_folder_refused(recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = assay("pair", f"{recipe}:apart", "--out", str(folder), *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert "did not fit into memory together" in " ".join(done.stderr.split())
    path = Path(recipe)
    path.write_text(RECIPE.replace("batch=4", "batch=5"))
    done = assay("pair", f"{recipe}:apart", "--out", str(folder), *OPTIONS)
    assert done.returncode == 2, done.stderr
    assert "is of other trainings" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("quikc",), "Unknown recipe 'quikc'. Did you mean quick"),
        (("nowhere.py:mine",), "There is no file nowhere.py"),
        (("RECIPE:mne",), "has no function 'mne'; name one of: study, mine"),
        (("RECIPE:mine", "--device", "abacus"), "no device 'abacus'"),
        (("RECIPE:mine", "--data", "folder:EMPTY"), "empty must hold images"),
        (("RECIPE:mine", "--data", "foldr:EMPTY"), "Unknown data 'foldr:EMPTY'. Did you mean folder"),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...], says: str, recipe: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()

    def real(text: str) -> str:
        return text.replace("RECIPE", recipe).replace("EMPTY", str(empty))

    out = () if "--device" in arguments else OPTIONS
    done = assay("pair", *map(real, arguments), "--out", str(tmp_path / "run"), *out)
    assert done.returncode == 2, done.stderr
    assert real(says) in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_null_that_is_not_0_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from assay.cli.pair import finish
    from assay.training.session import Outcome

    row: Record = dict.fromkeys(TRAINING.columns)
    null = row | {"pair": "null", "changed": "", "kind": "weights", "layer": "", "step": 3, "seed": 1, "max": 1e-9}
    finish("pair", Outcome(True, {}, False), [null | {"max": 0.0}], tmp_path)
    with pytest.raises(typer.Exit) as caught:
        finish("pair", Outcome(True, {}, False), [null], tmp_path)
    assert caught.value.exit_code == 1
    assert "first at step 3 (seed 1) by 1.0e-09. No figure of this run" in " ".join(capsys.readouterr().err.split())
