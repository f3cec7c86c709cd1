"""What counts as worse, and the file that it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.integrations.regressions import FALSE_ALARMS, Records, worse

ratios = st.lists(st.floats(0, 5), min_size=3, max_size=8)


@given(ratios)
def test_the_same_again_is_never_worse(values: list[float]) -> None:
    assert worse({"output, RMSE": values}, {"output, RMSE": values}) == []


@given(ratios, st.floats(1.01, 10))
def test_better_is_never_worse(values: list[float], factor: float) -> None:
    assert worse({"a": values}, {"a": [x / factor for x in values]}) == []


def test_redrawn_errors_are_rarely_worse() -> None:
    """Eight ratios of five seeds, drawn twice from the same distribution, four thousand times."""
    generator = np.random.default_rng(0)
    times = 4000
    drawn = generator.normal(1.0, 0.1, (times, 2, 8, 5))
    alarms = sum(bool(worse(*({str(i): list(row) for i, row in enumerate(side)} for side in pair))) for pair in drawn)
    assert alarms <= 3 * FALSE_ALARMS * times


def test_a_real_regression_is_seen_through_the_spread() -> None:
    generator = np.random.default_rng(0)
    recorded = {
        "output, RMSE": list(generator.normal(0.7, 0.01, 5)),
        "output, max": list(generator.normal(0.7, 0.2, 5)),
    }
    now = {name: [1.2 * x for x in values] for name, values in recorded.items()}
    (found,) = worse(recorded, now)
    assert found.what == "output, RMSE"
    assert found.recorded < found.limit < found.now


def test_what_is_new_or_gone_is_not_compared() -> None:
    assert worse({"gone": [1.0, 1.1, 0.9]}, {"new": [9.0, 9.0, 9.1]}) == []


def test_entries_are_kept_by_device_and_unchanged_ratios_add_none(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    records = Records(path)
    assert records.latest("t", "cpu") is None
    assert records.add("t", "cpu", "2.13.0", {"output, max": [1.0, 1.1, 1.2]})
    assert records.add("t", "H200", "2.13.0", {"output, max": [0.5, 0.5, 0.6]})
    assert not records.add("t", "cpu", "2.14.0", {"output, max": [1.0, 1.1, 1.2]})
    assert records.add("t", "cpu", "2.14.0", {"output, max": [1.0, 1.1, 1.3]})
    records.write()
    again = Records(path)
    assert again.tests == records.tests
    newest = again.latest("t", "cpu")
    assert newest is not None
    assert (newest["torch"], newest["ratios"]) == ("2.14.0", {"output, max": [1.0, 1.1, 1.3]})
    assert [e["device"] for e in again.tests["t"]] == ["cpu", "H200", "cpu"]
    assert sum('"date"' in line for line in path.read_text().splitlines()) == 3
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"assay_records": 99, "tests": {}}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "records.json"
    path.write_text(content)
    with pytest.raises(
        ValueError, match=r"records.json must hold error ratios.*delete it and run pytest --assay-update"
    ):
        Records(path)
    assert path.read_text() == content


def test_an_empty_file_of_ours_is_json(tmp_path: Path) -> None:
    Records(tmp_path / "records.json").write()
    assert json.loads((tmp_path / "records.json").read_text()) == {"assay_records": 1, "tests": {}}
