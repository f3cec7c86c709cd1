"""Points and rows of training in one folder do not disturb each other."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from assay.cli.compact import compact as command
from assay.results.lines import all_records, records_of
from assay.results.reader import compact, compact_all, read_records
from assay.results.record import POINTS, Record
from assay.results.store import Store
from assay.results.training_record import TRAINING
from tests.results.records import equal, make_record, make_records, make_training, write_lines
from tests.results.strategies import records

duckdb = pytest.importorskip("duckdb")

POINT_ROWS = make_records(3)
TRAINING_ROWS = [
    make_training(id="a", time="2026-11-15T06:00:01", max=math.nan, loss=math.inf, w1=-math.inf, rmse=-0.0, layer="é𝄞"),
    make_training(id="b", time="2026-11-15T06:00:02", pair=None, reference=None, kind="run", layer="", step=2**62),
    make_training(id="point-0", time="2026-11-15T06:00:03"),  # also the id of a point
]


def same(found: list[Record], expected: list[Record]) -> bool:
    return len(found) == len(expected) and all(map(equal, found, expected))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with both kinds, written by two stores."""
    with Store(tmp_path) as points, Store(tmp_path, TRAINING) as training:
        for one, other in zip(POINT_ROWS, TRAINING_ROWS, strict=True):
            points.append(one)
            training.append(other)
    return tmp_path


def test_each_kind_has_its_file(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert [re.sub(r"-\d{8}T\d{6}Z-.*-[0-9a-f]{4}\.", ".", name) for name in names] == [
        "records.jsonl",
        "training.jsonl",
    ]


def test_each_kind_is_read_alone(folder: Path) -> None:
    assert read_records(folder) == (POINT_ROWS, [])
    found = read_records(folder, schema=TRAINING)
    assert same(found.rows, TRAINING_ROWS)
    assert found.problems == []
    assert read_records(folder, ["step", "id"], TRAINING).rows[1] == {"step": 2**62, "id": "b"}
    with pytest.raises(ValueError, match=r"some of the schema's, got \['case'\]"):
        read_records(folder, ["case"], TRAINING)


def test_lines_of_each_kind_without_duckdb(folder: Path) -> None:
    assert all_records(folder) == POINT_ROWS
    assert same(all_records(folder, TRAINING), TRAINING_ROWS)
    assert same(records_of(folder, ["point-0", "missing", "a"], TRAINING), [TRAINING_ROWS[2], TRAINING_ROWS[0]])
    assert records_of(folder, ["point-0", "a"]) == [POINT_ROWS[0]]


def test_what_is_done_is_done_for_one_kind(folder: Path) -> None:
    points, training = Store(folder), Store(folder, TRAINING)
    assert points.done == {"point-0", "point-1", "point-2"}
    assert training.done == {"a", "b", "point-0"}
    points.append(make_record(id="new"))
    assert training.refresh() == set()
    training.append(make_training(id="new"))
    assert points.refresh() == set()
    assert Store(folder, TRAINING).refresh() == set()
    with pytest.raises(ValueError, match="'new' is done"):
        Store(folder, TRAINING).append(make_training(id="new"))


def test_a_store_takes_rows_of_its_kind_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training-\*\.jsonl must have the columns"):
        Store(tmp_path, TRAINING).append(make_record())
    with pytest.raises(ValueError, match=r"records-\*\.jsonl must have the columns"):
        Store(tmp_path).append(make_training())
    assert list(tmp_path.iterdir()) == []


def test_a_claim_is_one_of_its_kind(tmp_path: Path) -> None:
    with Store(tmp_path).claim("a") as point, Store(tmp_path, TRAINING).claim("a") as training:
        assert (point, training) == (True, True)
        with Store(tmp_path, TRAINING).claim("a") as again:
            assert not again


def test_each_kind_is_compacted_to_its_file(folder: Path) -> None:
    assert compact_all(folder) == [(folder / "records.parquet", 3, []), (folder / "training.parquet", 3, [])]
    assert compact_all(folder) == [(folder / "records.parquet", 3, []), (folder / "training.parquet", 3, [])]  # again
    for path in folder.glob("*.jsonl"):
        path.unlink()
    assert read_records(folder) == (POINT_ROWS, [])
    found = read_records(folder, schema=TRAINING)
    assert same(found.rows, TRAINING_ROWS)
    assert found.problems == []
    with duckdb.connect() as connection:
        types = connection.read_parquet(str(folder / "training.parquet")).project("loss, step, layer").types
    assert [str(kind) for kind in types] == ["DOUBLE", "BIGINT", "VARCHAR"]


def test_one_kind_can_be_compacted_alone(folder: Path) -> None:
    assert compact(folder, TRAINING) == (folder / "training.parquet", 3, [])
    assert not (folder / "records.parquet").exists()


@given(st.lists(records(TRAINING), min_size=1, max_size=10, unique_by=lambda record: record["id"]))
@settings(max_examples=10)
def test_any_training_rows_come_back_from_both_files(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Record]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    with Store(folder, TRAINING) as store:
        for row in rows:
            store.append(row)
    expected = sorted(rows, key=lambda row: (row["time"], row["id"]))
    assert same(read_records(folder, schema=TRAINING).rows, expected)
    compact(folder, TRAINING)
    next(folder.glob("*.jsonl")).unlink()
    assert same(read_records(folder, schema=TRAINING).rows, expected)


def test_lines_of_the_wrong_kind_are_named(folder: Path) -> None:
    write_lines(folder / "training-wrong.jsonl", POINT_ROWS)
    write_lines(folder / "wrong.jsonl", TRAINING_ROWS, TRAINING)
    points, training = read_records(folder), read_records(folder, schema=TRAINING)
    assert points.rows == POINT_ROWS
    assert same(training.rows, TRAINING_ROWS)
    (problem,) = points.problems
    assert problem.startswith(
        "wrong.jsonl: 3 of its 3 lines are not records and were left out (line 1: a record in rec"
    )
    (problem,) = training.problems
    assert problem.startswith("training-wrong.jsonl: 3 of its 3 lines are not records and were left out (line 1: a rec")
    assert Store(folder).done == {row["id"] for row in POINT_ROWS}
    assert Store(folder, TRAINING).done == {row["id"] for row in TRAINING_ROWS}


def test_one_line_of_the_wrong_kind_spoils_no_other(folder: Path) -> None:
    path = next(folder.glob("training-*.jsonl"))
    with path.open("a", encoding="utf-8") as file:
        file.write(POINTS.to_json(make_record(id="z")) + "\n")
    found = read_records(folder, schema=TRAINING)
    assert same(found.rows, TRAINING_ROWS)
    (problem,) = found.problems
    assert f"{path.name}: 1 of its 4 lines" in problem


def test_a_parquet_file_of_the_wrong_kind_is_named_and_not_replaced(folder: Path) -> None:
    compact_all(folder)
    (folder / "training.parquet").rename(folder / "copy.parquet")
    assert read_records(folder).problems == [
        "copy.parquet: its rows are of another kind, which belongs into training.parquet; it was left out."
    ]
    (folder / "records.parquet").rename(folder / "training.parquet")
    before = (folder / "training.parquet").read_bytes()
    problem = "training.parquet: its rows are of another kind, which belongs into records.parquet; it was left out."
    assert read_records(folder, schema=TRAINING).problems == [problem]
    with pytest.raises(ValueError, match=f"{re.escape(problem)} Move it away"):
        compact(folder, TRAINING)
    assert (folder / "training.parquet").read_bytes() == before


def test_a_training_row_that_was_cut_is_said(folder: Path) -> None:
    path = next(folder.glob("training-*.jsonl"))
    path.write_bytes(path.read_bytes()[:-20])
    found = read_records(folder, schema=TRAINING)
    assert same(found.rows, TRAINING_ROWS[:2])
    assert [problem.split(":")[:2] for problem in found.problems] == [
        [path.name, " its last line has no end and was left out"]
    ]
    assert Store(folder, TRAINING).done == {"a", "b"}
    assert read_records(folder) == (POINT_ROWS, [])


app = typer.Typer()
app.command()(command)
run = CliRunner().invoke


def test_the_command_compacts_both(folder: Path) -> None:
    done = run(app, [str(folder)])
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [f"{folder / name}.parquet: 3 records" for name in ("records", "training")]
    assert done.stderr == ""
    printed = json.loads(run(app, [str(folder), "--json"]).stdout)
    assert printed == [
        {"path": str(folder / f"{name}.parquet"), "rows": 3, "problems": []} for name in ("records", "training")
    ]


def test_the_command_on_training_alone(tmp_path: Path) -> None:
    """Another file of lines beside it, such as captions of images, is named and does not stop it."""
    write_lines(tmp_path / "training-1.jsonl", TRAINING_ROWS, TRAINING)
    printed = json.loads(run(app, [str(tmp_path), "--json"]).stdout)
    assert printed == {"path": str(tmp_path / "training.parquet"), "rows": 3, "problems": []}
    (tmp_path / "captions.jsonl").write_text('{"file": "a.png"}\n')
    done = run(app, [str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [f"{tmp_path / 'training.parquet'}: 3 records"]
    assert "Left out: captions.jsonl: 1 of its 1 lines are not records" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "captions.jsonl",
        "training-1.jsonl",
        "training.parquet",
    ]
