"""A record goes through one line of JSON and comes back as it was."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings

from assay.results.record import COLUMNS, Record, from_json, to_json
from tests.results.records import equal, make_record
from tests.results.strategies import records


@given(records())
@settings(max_examples=60)
def test_round_trip(record: Record) -> None:
    line = to_json(record)
    assert "\n" not in line
    assert equal(from_json(line), record)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_not_finite_values_are_words() -> None:
    values = json.loads(to_json(make_record(error_max=math.nan, error_w1=math.inf, null_max=-math.inf)))
    assert (values["error_max"], values["error_w1"], values["null_max"]) == ("nan", "inf", "-inf")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("batch", "3"),
        ("batch", 3.0),
        ("batch", True),
        ("causal", 1),
        ("format", 16),
        ("error_max", "big"),
        ("seed", []),
    ],
)
def test_a_value_of_another_type_is_refused(column: str, value: Any) -> None:
    values = json.loads(to_json(make_record())) | {column: value}
    with pytest.raises(ValueError, match=f"column {column} must be {COLUMNS[column].__name__}"):
        from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "no schema"),
        ("{}", "no schema"),
        ('{"schema": 2}', "schema 2; this version reads schema 1"),
        ('{"schema": 1, "id": "a"}', "missing: "),
    ],
)
def test_a_line_that_is_no_record_is_refused(line: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        from_json(line)


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown: .'errror_max'"):
        to_json(make_record() | {"errror_max": 1.0})
