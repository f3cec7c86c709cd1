"""Differences of two trainings: assay.compare_state_dicts, scipy and plain NumPy are the judges."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor

import assay
from assay.training.observation import KINDS, Known, differences, observe
from tests.training.small import BASE, TEXT, new_run, trained


def two() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    shapes = {"a": (40, 30), "b": (17,), "c": (3, 5, 7), "one": (1,)}
    reference = {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
    return {name: x + 0.1 * torch.randn(x.shape, generator=source) for name, x in reference.items()}, reference


def test_as_compare_state_dicts_and_scipy_have_it() -> None:
    arm, reference = two()
    whole, *layers = differences(arm, reference)
    expected = assay.compare_state_dicts(arm, reference)
    for found, wanted in zip((whole, *layers), (expected.combined, *expected.layers), strict=True):
        assert found.name == ("" if wanted is expected.combined else wanted.name)
        assert found.count == wanted.count
        for figure in ("max", "rmse", "wasserstein", "reference_std"):
            assert getattr(found, figure) == pytest.approx(getattr(wanted, figure), rel=1e-5), figure
    for layer in layers:
        values = (x[layer.name].double().flatten().numpy() for x in (arm, reference))
        assert layer.wasserstein == pytest.approx(wasserstein_distance(*values), rel=1e-6)


def test_other_dtypes_are_compared_by_value() -> None:
    _, reference = two()
    low = {name: x.bfloat16() for name, x in reference.items()}
    (whole, *_) = differences(low, reference)
    gap = np.concatenate([(low[n].double() - x.double()).flatten().numpy() for n, x in reference.items()])
    assert whole.max == pytest.approx(np.abs(gap).max(), rel=1e-6)
    assert whole.rmse == pytest.approx(np.sqrt((gap**2).mean()), rel=1e-5)


def test_a_permutation_has_no_distance_but_differs() -> None:
    x = torch.arange(10.0)
    whole, _ = differences({"x": x.flip(0)}, {"x": x})
    assert (whole.wasserstein, whole.max) == (0, 9)


def test_equal_tensors_are_exactly_0() -> None:
    arm, _ = two()
    for found in differences({name: x.clone() for name, x in arm.items()}, arm):
        assert (found.max, found.rmse, found.wasserstein) == (0, 0, 0)


def test_what_only_one_has_is_left_out() -> None:
    x = torch.arange(4.0)
    found = differences({"x": x, "mine": x, "other": x}, {"x": x + 1, "yours": x, "other": x[:2]})
    assert [(d.name, d.count, d.max) for d in found] == [("", 4, 1), ("x", 4, 1)]
    assert differences({"mine": x}, {"yours": x}) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = torch.arange(4.0)
    spoilt = x.clone()
    spoilt[2] = bad
    for arm, reference in ((spoilt, x), (x, spoilt)):
        whole, layer = differences({"x": arm}, {"x": reference})
        assert not any(
            map(math.isfinite, (layer.max, layer.rmse, layer.wasserstein, whole.max, whole.rmse, whole.wasserstein))
        )


def test_sorting_once_for_several_pairs_changes_nothing() -> None:
    arm, reference = two()
    other = {name: 2 * x for name, x in arm.items()}
    known = Known()
    for one in (arm, other):
        assert differences(one, reference, known) == differences(one, reference)
    assert len(known._ordered) == 3 * len(reference)


def test_equal_tensors_are_not_sorted() -> None:
    arm, _ = two()
    known = Known()
    assert differences({name: x.clone() for name, x in arm.items()}, arm, known)[0].wasserstein == 0
    assert not known._ordered


def test_the_order_of_the_layers_does_not_matter() -> None:
    arm, reference = two()
    turned = differences(dict(reversed(arm.items())), dict(reversed(reference.items())))
    assert turned[0] == differences(arm, reference)[0]


@pytest.mark.parametrize("task", ["images", "text"])
def test_what_is_observed(task: str) -> None:
    run = trained(BASE if task == "images" else TEXT, steps=1)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    held_out, seen = observe(run)
    assert tuple(seen) == KINDS
    names = {name for name, _ in run.model.named_parameters()}
    assert seen["weights"].keys() == seen["gradients"].keys() == names
    assert seen["optimizer"].keys() == {f"{key} {name}" for key in ("exp_avg", "exp_avg_sq") for name in names}
    blocks = 1 if task == "images" else 2
    assert list(seen["activations"]) == [*(f"block {i}" for i in range(blocks)), "output"]
    with torch.no_grad():
        batch = run.task.probe()
        if task == "images":
            images, words, noise, time = batch
            t = time[:, None, None, None]
            expected = run.model((1 - t) * images + t * noise, time, words)
        else:
            expected = run.model(batch[0][:, :-1])
    assert torch.equal(seen["activations"]["output"], expected)
    with torch.no_grad():
        assert held_out == float(run.task.loss(run.model, batch))
    assert all(torch.equal(before[name], p) for name, p in run.model.named_parameters())
    assert not any(module._forward_hooks for module in run.model.modules())


def test_other_weights_show_in_every_kind() -> None:
    one, other = (trained(replace(BASE, init_seed=seed), steps=2) for seed in (0, 1))
    for kind in KINDS:
        assert differences(observe(one)[1][kind], observe(other)[1][kind])[0].max > 0
    untrained = new_run(BASE)
    assert observe(untrained)[1]["gradients"] == observe(untrained)[1]["optimizer"] == {}
