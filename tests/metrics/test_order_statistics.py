"""Exact selection against sorting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.metrics import order_statistics as module

nonnegative = st.floats(0, allow_nan=False, allow_infinity=False).map(abs)


def in_chunks(values: Tensor) -> Iterator[Tensor]:
    return (values[i : i + 7] for i in range(0, len(values), 7))


@settings(max_examples=80, deadline=None)
@given(values=st.lists(nonnegative, min_size=1, max_size=80), limit=st.integers(1, 20), data=st.data())
def test_every_rank(values: list[float], limit: int, data: st.DataObject) -> None:
    ranks = sorted(data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1, max_size=6)))
    x = torch.tensor(values, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GATHER_LIMIT", limit)
        found = module.order_statistics(lambda: in_chunks(x), len(values), ranks)
    assert found == [sorted(values)[rank] for rank in ranks]


@pytest.mark.parametrize("values", [[0.0] * 50, [5e-324] * 20 + [1.0] * 30, [1 + k * 2.0**-52 for k in range(50)]])
def test_ties_and_neighbours(values: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_LIMIT", 4)
    x = torch.tensor(values, dtype=torch.float64)
    ranks = [0, 19, 20, 49]
    assert module.order_statistics(lambda: in_chunks(x), 50, ranks) == [values[rank] for rank in ranks]


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), level=st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values: list[float], level: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    found = module.quantiles(lambda: in_chunks(x), len(values), [level])
    assert found[level] == pytest.approx(np.quantile(values, level), rel=1e-12, abs=1e-300)


def test_no_levels_and_no_values() -> None:
    assert module.quantiles(lambda: iter([]), 0, []) == {}
    assert np.isnan(module.quantiles(lambda: iter([]), 0, [0.5])[0.5])
