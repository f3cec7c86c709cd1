"""Comparing sets of weights."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor, nn

from assay.metrics.state_dicts import compare_state_dicts


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(20, 5, generator=generator),
        "norm.steps": torch.tensor(3),
        "head.weight": torch.randn(5, 8, generator=generator) * 0.1,
        "head.bias": torch.zeros(8),
    }


def test_rows_and_their_order() -> None:
    a, b = weights(1), weights(2)
    found = compare_state_dicts(a, b)
    assert [layer.name for layer in found.layers] == ["embed.weight", "head.weight", "head.bias"]
    assert found.skipped == ("norm.steps",)
    first = found.layers[0]
    x, y = a["embed.weight"].double().numpy(), b["embed.weight"].double().numpy()
    assert first.count == 100
    assert first.max == abs(x - y).max()
    assert first.rmse == pytest.approx(math.sqrt(((x - y) ** 2).mean()), rel=1e-12)
    assert first.wasserstein == pytest.approx(wasserstein_distance(x.ravel(), y.ravel()), rel=1e-12)
    assert first.reference_std == pytest.approx(y.std(), rel=1e-12)
    assert first.relative_wasserstein == pytest.approx(first.wasserstein / y.std(), rel=1e-12)


def test_combined_is_the_model_as_one() -> None:
    a, b = weights(1), weights(2)
    found = compare_state_dicts(a, b)
    names = ["embed.weight", "head.weight", "head.bias"]
    d = torch.cat([(a[name].double() - b[name].double()).flatten() for name in names])
    assert found.combined.count == d.numel() == 148
    assert found.combined.max == float(d.abs().max())
    assert found.combined.rmse == pytest.approx(float(d.square().mean().sqrt()), rel=1e-12)
    mean = sum(layer.count * layer.wasserstein for layer in found.layers) / 148
    assert found.combined.wasserstein == pytest.approx(mean, rel=1e-12)


def test_the_same_weights_twice() -> None:
    found = compare_state_dicts(weights(), weights())
    for row in (*found.layers, found.combined):
        assert (row.max, row.rmse, row.wasserstein, row.relative_rmse, row.relative_wasserstein) == (0,) * 5


def test_a_permutation_shows_in_the_elementwise_figures_only() -> None:
    a, b = {"w": torch.arange(6.0)}, {"w": torch.arange(6.0).flip(0)}
    row = compare_state_dicts(a, b).combined
    assert row.wasserstein == 0
    assert row.max == 5
    assert row.relative_rmse > 0


def test_constant_weights_that_moved() -> None:
    row = compare_state_dicts({"w": torch.ones(3)}, {"w": torch.zeros(3)}).layers[0]
    assert row.relative_rmse == math.inf


def test_a_nan_reaches_the_summary() -> None:
    bad = weights()
    bad["head.weight"][0, 0] = math.nan
    found = compare_state_dicts(bad, weights())
    assert found.combined.max == math.inf
    assert math.isnan(found.combined.wasserstein)
    all_nan = {"w": torch.full((2,), math.nan), "v": torch.ones(2)}
    assert math.isnan(compare_state_dicts(all_nan, all_nan).combined.max)


def test_a_module_and_its_low_precision_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    low = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    found = compare_state_dicts(low, model.state_dict(), p=2)
    assert found.skipped == ("1.num_batches_tracked",)
    assert 0 < found.combined.relative_rmse < 2**-8
    assert found.p == 2


def test_refusals() -> None:
    a, b = {"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2), "z": torch.ones(2)}
    with pytest.raises(ValueError, match=r"only in reference: \['z'\], only in actual: \['y'\]"):
        compare_state_dicts(a, b)
    with pytest.raises(ValueError, match=r"x \(2,\) and \(3,\)"):
        compare_state_dicts({"x": torch.ones(2)}, {"x": torch.ones(3)})
    with pytest.raises(ValueError, match="got Linear"):
        compare_state_dicts(nn.Linear(1, 1), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one floating-point tensor"):
        compare_state_dicts({"n": torch.tensor(1)}, {"n": torch.tensor(1)})
