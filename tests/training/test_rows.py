"""Rows: what is written of a step and of a pair, and which id it has."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
from torch import nn

from assay.metrics.state_dicts import WeightDifference
from assay.results.training_record import TRAINING
from assay.training.precision import POLICIES
from assay.training.rows import Rows, identity_of, is_of_run
from assay.training.run import Progress
from assay.training.training import Pair, PairStudy, Training
from tests.training.small import BASE, control_study, new_run

FOUND = WeightDifference(name="block", count=10, max=0.5, rmse=0.25, wasserstein=0.125, reference_std=2.0)


def shift(model: nn.Module, by: float = 0.0) -> None:
    pass


def test_a_step_of_a_run() -> None:
    rows = Rows(control_study(), "mine", 3, "cpu")
    run = new_run(replace(BASE, accumulate=2))
    run.step, run.skipped = 4, [1, 2]
    row = rows.of_run("base", run, Progress(1.5, 2.5, 8.0, True, 0.25), None)
    assert row.keys() == TRAINING.columns.keys()
    assert TRAINING.from_json(TRAINING.to_json(row)) == row
    expected = {
        "recipe": "mine",
        "pair": None,
        "arm": "base",
        "kind": "run",
        "layer": "",
        "model": "text_to_image dot",
        "data": "synthetic shapes",
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "attention": "standard",
        "precision": "bf16",
        "optimizer": "adamw",
        "batch": 8,
        "seed": 3,
        "steps": 6,
        "step": 4,
        "loss": 1.5,
        "held_out": None,
        "grad_norm": 2.5,
        "scale": 8.0,
        "skipped": 2,
        "step_seconds": 0.25,
    }
    assert {name: row[name] for name in expected} == expected
    assert is_of_run(row["id"])


def test_a_layer_of_a_pair() -> None:
    study = control_study()
    rows, low = Rows(study, "mine", 0, "cpu"), study.pairs[1]
    row = rows.of_pair(low, new_run(), 2, "weights", FOUND, 0.5)
    assert TRAINING.from_json(TRAINING.to_json(row)) == row
    expected = {
        "pair": "low",
        "arm": "fp16",
        "reference": "base",
        "changed": "precision",
        "changed_from": "bf16",
        "changed_to": "fp16",
        "count": 10,
        "max": 0.5,
        "rmse": 0.25,
        "w1": 0.125,
        "std": 2.0,
        "relative_rmse": 0.125,
        "relative_w1": 0.0625,
    }
    assert {name: row[name] for name in expected} == expected
    assert not is_of_run(row["id"])
    still = rows.of_pair(low, new_run(), 2, "weights", replace(FOUND, reference_std=0.0), 0.5)
    assert (still["relative_rmse"], still["relative_w1"]) == (math.inf, math.inf)
    nothing = replace(FOUND, rmse=0.0, wasserstein=0.0, reference_std=0.0)
    null = rows.of_pair(low, new_run(), 2, "weights", nothing, 0.5)
    assert (null["relative_rmse"], null["relative_w1"]) == (0.0, 0.0)


def test_an_id_is_of_its_place() -> None:
    study = control_study()
    rows, run = Rows(study, "mine", 0, "cpu"), new_run()
    ids = [
        Rows(study, "mine", seed, "cpu").of_pair(pair, run, step, kind, replace(FOUND, name=layer), 0.1)["id"]
        for seed in (0, 1)
        for pair in study.pairs
        for step in (1, 2)
        for kind in ("weights", "gradients")
        for layer in ("", "block")
    ]
    ids += [rows.of_run(name, run, Progress(1, 1, 1, False, 1), None)["id"] for name in study.trainings]
    assert len(set(ids)) == len(ids) == 2 * 3 * 2 * 2 * 2 + 5
    again = Rows(study, "another name", 0, "cpu").of_pair(study.pairs[0], run, 1, "weights", FOUND, 9.0)
    assert again["id"] == rows.of_pair(study.pairs[0], run, 1, "weights", FOUND, 0.1)["id"]


@pytest.mark.parametrize(
    "change",
    [{"learning_rate": 2e-3}, {"precision": POLICIES["bf16"].replace(norms="matmul")}, {"change": shift}, {"steps": 7}],
    ids=str,
)
def test_an_identity_is_of_the_trainings(change: dict[str, object]) -> None:
    def study(base: Training) -> PairStudy:
        pair = Pair(name="null", arm="a", reference="b", several=True)
        return PairStudy(asked="", trainings={"a": base, "b": base}, pairs=(pair,))

    mine = identity_of(study(BASE), 0, "CPU")
    assert mine == identity_of(study(BASE), 0, "CPU")
    others = {
        identity_of(study(replace(BASE, **change)), 0, "CPU"),  # type: ignore[arg-type]
        identity_of(study(BASE), 1, "CPU"),
        identity_of(study(BASE), 0, "H200"),
    }
    assert mine not in others
    assert len(others) == 3


def test_any_callable_has_a_name_that_is_the_same_tomorrow() -> None:
    class Shift:
        def __call__(self, model: nn.Module) -> None:
            pass

    arm = replace(BASE, change=functools.partial(shift, by=1.0))
    reference = replace(BASE, change=Shift())
    pair = Pair(name="shift", arm="arm", reference="reference")
    study = PairStudy(asked="", trainings={"arm": arm, "reference": reference}, pairs=(pair,))
    row = Rows(study, "", 0, "cpu").of_pair(pair, new_run(), 1, "weights", FOUND, 0.1)
    assert row["changed_to"] == "functools.partial(<function shift>, by=1.0)"
    assert "Shift object" in row["changed_from"]
    assert " at 0x" not in row["changed_from"]
    moved = replace(study, trainings={"arm": arm, "reference": replace(BASE, change=Shift())})
    assert identity_of(moved, 0, "CPU") == identity_of(study, 0, "CPU")
