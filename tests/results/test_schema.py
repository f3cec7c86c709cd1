"""What a schema is, whose a file is, and the lines of training rows."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings

from assay.results.kinds import KINDS, kind_with
from assay.results.record import COLUMNS, POINTS, PROVENANCE, Record
from assay.results.schema import Schema
from assay.results.training_record import TRAINING
from tests.results.records import equal, make_record, make_training
from tests.results.strategies import records


@given(records(TRAINING))
@settings(max_examples=60)
def test_training_round_trip(record: Record) -> None:
    line = TRAINING.to_json(record)
    assert "\n" not in line
    assert equal(TRAINING.from_json(line), record)
    assert TRAINING.id_of(line.encode()) == record["id"]
    assert POINTS.id_of(line.encode()) is None
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_training_has_the_columns_of_the_issue() -> None:
    columns = {
        str: "recipe pair arm reference changed changed_from changed_to model data attention precision optimizer kind "
        "layer",
        int: "parameters batch seed steps step count skipped",
        float: "max rmse w1 std relative_rmse relative_w1 loss reference_loss held_out grad_norm scale step_seconds",
    }
    expected = PROVENANCE | {name: kind for kind, names in columns.items() for name in names.split()}
    assert TRAINING.columns == expected
    assert list(TRAINING.columns)[: len(PROVENANCE)] == list(PROVENANCE)


def test_not_finite_values_are_words() -> None:
    values = json.loads(TRAINING.to_json(make_training(max=math.nan, loss=math.inf, w1=-math.inf)))
    assert (values["max"], values["loss"], values["w1"]) == ("nan", "inf", "-inf")


@pytest.mark.parametrize(
    ("column", "value"), [("step", 1.0), ("step", True), ("loss", "low"), ("pair", 3), ("skipped", 2**63), ("id", None)]
)
def test_a_value_of_another_type_is_refused(column: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"column {column} must"):
        TRAINING.to_json(make_training(**{column: value}))
    with pytest.raises(ValueError, match=f"column {column} must"):
        TRAINING.from_json(json.dumps(make_training(**{column: value})))


def test_a_row_of_another_kind_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a record in training-\*\.jsonl must .* unknown: \['case', .* missing: \['re"
    ):
        TRAINING.from_json(POINTS.to_json(make_record()))
    with pytest.raises(
        ValueError, match=r"a record in records-\*\.jsonl must .* unknown: \['recipe', .* missing: \['c"
    ):
        POINTS.to_json(make_training())


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("records-20261115T060000Z-host-1-0a0b.jsonl", POINTS),
        ("records.parquet", POINTS),
        ("anything.jsonl", POINTS),
        ("other machine.parquet", POINTS),
        ("training.jsonl", POINTS),
        ("training-old.parquet", POINTS),
        ("my-training-1.jsonl", POINTS),
        ("trainings-1.jsonl", POINTS),
        ("training-20261115T060000Z-host-1-0a0b.jsonl", TRAINING),
        ("training-.jsonl", TRAINING),
        ("training.parquet", TRAINING),
        ("training-1.jsonl.bak", None),
        ("records.txt", None),
        (".claims", None),
        (".compact-1-0a0b.tmp", None),
    ],
)
def test_every_file_has_one_owner(name: str, owner: Schema | None) -> None:
    assert [kind for kind in KINDS if kind.owns(name)] == ([owner] if owner else [])


def test_points_know_all_other_kinds() -> None:
    """Else the reader of points would take their files for broken ones of its own."""
    assert POINTS.others == tuple(kind.stem for kind in KINDS if kind is not POINTS)
    assert [kind.others for kind in KINDS if kind is not POINTS] == [None] * (len(KINDS) - 1)
    assert [kind_with(list(kind.columns)) for kind in KINDS] == list(KINDS)
    assert kind_with(["schema", "id"]) is None


def test_a_schema_does_not_change_and_goes_to_other_processes() -> None:
    with pytest.raises(FrozenInstanceError):
        POINTS.version = 2  # type: ignore[misc]
    for kind in KINDS:
        copy = pickle.loads(pickle.dumps(kind))
        assert copy == kind
        assert hash(copy) == hash(kind)
    assert POINTS != TRAINING
    assert POINTS.columns == COLUMNS


@pytest.mark.parametrize("columns", [{}, {"id": str, "schema": int, "time": str}, {**PROVENANCE, "shape": tuple}])
def test_columns_that_cannot_be_kept_are_refused(columns: dict[str, type]) -> None:
    with pytest.raises(ValueError, match="must have columns of str, int, float or bool that begin with schema, id"):
        Schema(stem="x", version=1, columns=columns)
