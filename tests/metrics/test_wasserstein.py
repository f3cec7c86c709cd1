"""wasserstein() against scipy, and against optimal assignment where scipy has no formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.stats import wasserstein_distance
from torch import Tensor

from assay.metrics import chunks
from assay.metrics import wasserstein as module
from assay.metrics.sorted_runs import bucketed_runs, partition_by_masks
from assay.metrics.wasserstein import wasserstein

INF, NAN = math.inf, math.nan
samples = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)


def by_scipy(a: Tensor, b: Tensor) -> float:
    return float(wasserstein_distance(a.double().flatten().numpy(), b.double().flatten().numpy()))


def by_assignment(a: Tensor, b: Tensor, p: float) -> float:
    """Optimal transport itself, with no appeal to sorting: every element repeated until sizes agree."""
    x = a.double().numpy().repeat(len(b))
    y = b.double().numpy().repeat(len(a))
    cost = np.abs(x[:, None] - y[None, :]) ** p
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].mean() ** (1 / p))


def draw(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 7), (1000, 1000), (997, 1313), (12, 8), (60_000, 40_000)])
def test_equals_scipy(n: int, m: int, dtype: torch.dtype) -> None:
    a, b = draw(n, 1, dtype), draw(m, 2, dtype) * 1.5
    assert wasserstein(a, b) == pytest.approx(by_scipy(a, b), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrow_dtypes_are_promoted_exactly(dtype: torch.dtype) -> None:
    a, b = draw(500, 1, dtype), draw(333, 2, dtype)
    assert wasserstein(a, b) == pytest.approx(by_scipy(a, b), rel=1e-12)


def test_mixed_dtypes_and_any_layout() -> None:
    a, b = draw(600, 1).reshape(20, 30), draw(600, 2, torch.bfloat16).reshape(30, 20)
    assert wasserstein(a.T, b[::2]) == pytest.approx(by_scipy(a, b[::2]), rel=1e-12)


def test_inputs_are_left_alone() -> None:
    a, b = draw(50, 1, torch.float32), draw(50, 2, torch.float32).requires_grad_()
    before = a.clone()
    wasserstein(a, b)
    assert torch.equal(a, before)


@settings(max_examples=60, deadline=None)
@given(a=samples, b=samples, p=st.sampled_from([1, 1.5, 2, 3]))
def test_equals_optimal_assignment(a: list[float], b: list[float], p: float) -> None:
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert wasserstein(x, y, p) == pytest.approx(by_assignment(x, y, p), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(a=samples, b=samples, c=samples, p=st.sampled_from([1, 2]))
def test_is_a_metric(a: list[float], b: list[float], c: list[float], p: float) -> None:
    x, y, z = (torch.tensor(v, dtype=torch.float64) for v in (a, b, c))
    assert wasserstein(x, x, p) == 0
    assert wasserstein(x, y, p) == pytest.approx(wasserstein(y, x, p), rel=1e-12, abs=1e-300)
    assert wasserstein(x, z, p) <= wasserstein(x, y, p) + wasserstein(y, z, p) + 1e-9


@settings(max_examples=60, deadline=None)
@given(a=samples, b=samples, shift=st.integers(-50, 50), p=st.sampled_from([1, 2]), data=st.data())
def test_translation_scale_and_permutation(
    a: list[float], b: list[float], shift: int, p: float, data: st.DataObject
) -> None:
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert wasserstein(x, x + shift, p) == pytest.approx(abs(shift), rel=1e-9)
    assert wasserstein(-4 * x, -4 * y, p) == pytest.approx(4 * wasserstein(x, y, p), rel=1e-12, abs=1e-300)
    shuffled = torch.tensor(data.draw(st.permutations(a)), dtype=torch.float64)
    assert wasserstein(shuffled, y, p) == wasserstein(x, y, p)


@pytest.mark.parametrize("chunk", [1, 10, 64])
@pytest.mark.parametrize(("n", "m"), [(64, 64), (63, 63), (129, 129), (64, 128), (65, 130), (7, 100)])
@pytest.mark.parametrize("p", [1, 2])
def test_sizes_around_the_chunk(n: int, m: int, chunk: int, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = draw(n, 1), draw(m, 2)
    whole = wasserstein(a, b, p)
    monkeypatch.setattr(chunks, "CPU_CHUNK", chunk)
    assert wasserstein(a, b, p) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("n", "m"), [(500, 500), (500, 333), (501, 1000)])
def test_many_runs_give_what_one_run_gives(n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator does with large tensors, done here: runs of `a` and `b` that do not line up."""
    a, b = draw(n, 1, torch.float32), torch.relu(draw(m, 2, torch.float32))
    monkeypatch.setattr("assay.metrics.sorted_runs.SINGLE_SORT_LIMIT", 20)
    monkeypatch.setattr(module, "sorted_runs", lambda x: bucketed_runs(x, partition_by_masks))
    assert wasserstein(a, b) == pytest.approx(by_scipy(a, b), rel=1e-12)


@pytest.mark.parametrize("m", [40, 30])
@pytest.mark.parametrize("scale", [2.0**-600, 2.0**600])
def test_powers_do_not_leave_the_range(scale: float, m: int) -> None:
    a, b = draw(40, 1), draw(m, 2)
    assert wasserstein(a * scale, b * scale, 3) == pytest.approx(wasserstein(a, b, 3) * scale, rel=1e-12)


def test_nan_and_infinities() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    assert math.isnan(wasserstein(torch.tensor([1.0, NAN, 3.0]), x))
    assert math.isnan(wasserstein(x, torch.tensor([NAN])))
    assert wasserstein(x, torch.tensor([1.0, 2.0, INF])) == INF
    assert wasserstein(x, torch.tensor([-INF, 2.0])) == INF
    assert wasserstein(x, torch.tensor([1.0, 2.0, INF]), 2) == INF
    assert wasserstein(x, torch.tensor([-INF, 2.0]), 2) == INF
    assert math.isnan(wasserstein(torch.tensor([INF, 1.0]), torch.tensor([INF, 2.0])))


def test_refusals() -> None:
    x = torch.ones(3)
    refused: list[Any] = [0, 0.5, -1, INF, NAN, "1", None]
    for p in refused:
        with pytest.raises(ValueError, match="p must be a finite number of at least 1"):
            wasserstein(x, x, p)
    with pytest.raises(ValueError, match=r"torch\.from_numpy"):
        wasserstein(np.ones(3), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one element"):
        wasserstein(x, torch.ones(0))
    with pytest.raises(ValueError, match="floating-point dtype"):
        wasserstein(x, torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="one device"):
        wasserstein(x, torch.ones(3, device="meta"))
