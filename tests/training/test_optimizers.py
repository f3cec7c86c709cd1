"""Optimizers by name: each lowers a loss, decays what it should, and takes the rates of the schedule."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from assay.training.observation import observe
from assay.training.optimizers import OPTIMIZERS, learning_rate, make_optimizers, set_rate, states
from tests.training.small import BASE, TEXT, new_run, trained


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("task", ["images", "text"])
def test_every_optimizer_lowers_the_loss(name: str, task: str) -> None:
    rate = {"sgd": 0.3, "adamw": 1e-2, "muon": 1e-2}[name]
    base = BASE if task == "images" else TEXT
    training = replace(base, steps=25, batch=16, optimizer=name, learning_rate=rate, precision="fp32")
    run = new_run(training)
    before = observe(run)[0]
    for _ in range(training.steps):
        run.advance()
    assert observe(run)[0] < 0.93 * before


def test_muon_takes_the_matrices_inside() -> None:
    model = new_run(TEXT).model
    muon, adamw = make_optimizers("muon", model, 1e-3, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    inner = [names[id(p)] for group in muon.param_groups for p in group["params"]]
    rest = [names[id(p)] for group in adamw.param_groups for p in group["params"]]
    assert sorted(inner + rest) == sorted(names.values())
    assert all(name.startswith("blocks.") and "norm" not in name for name in inner)
    assert {"embedding.weight", "last_norm.weight"} <= set(rest)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_vectors_do_not_decay(name: str) -> None:
    (optimizer,) = make_optimizers(name, new_run(BASE).model, 1e-3, 0.1)
    decays = [(group["weight_decay"], {p.ndim > 1 for p in group["params"]}) for group in optimizer.param_groups]
    assert decays == [(0.1, {True}), (0.0, {False})]


def test_the_rate_goes_up_in_a_line_and_down_a_cosine() -> None:
    rates = [learning_rate(step, 100, 10, 2.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(100, 100, 10, 2.0) == pytest.approx(0.2)
    assert learning_rate(0, 1, 0, 2.0) == 2.0


def test_setting_the_rate_reaches_all_groups() -> None:
    optimizers = make_optimizers("muon", new_run(TEXT).model, 1e-3, 0.1)
    set_rate(optimizers, 0.5)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.5}


@pytest.mark.parametrize(
    ("name", "keys"),
    [("adamw", {"step", "exp_avg", "exp_avg_sq"}), ("sgd", {"momentum_buffer"})],
)
def test_the_state_of_every_parameter(name: str, keys: set[str]) -> None:
    run = trained(replace(BASE, optimizer=name), steps=1)
    found = dict(states(run.model, run.optimizers))
    parameters = [parameter for parameter, _ in run.model.named_parameters()]
    assert found.keys() == {f"{key} {parameter}" for key in keys for parameter in parameters}
    assert all(isinstance(value, torch.Tensor) for value in found.values())
