"""One Parquet file of a run, and the command that writes it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from assay.cli.compact import compact as command
from assay.results.reader import compact, read_records
from assay.results.record import COLUMNS
from assay.results.store import Store
from tests.results.records import equal, make_record, make_records, write_lines

duckdb = pytest.importorskip("duckdb")

TYPES = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        found: list[tuple[Any, ...]] = connection.execute(sql, [str(path)]).fetchall()
        return found


def test_columns_are_typed_and_values_survive(tmp_path: Path) -> None:
    rows = [
        make_record(id="a", error_max=math.nan, error_w1=math.inf, null_max=-math.inf, plan="é𝄞"),
        make_record(id="b", **{name: None for name in COLUMNS if name not in ("schema", "id", "time")}),
    ]
    write_lines(tmp_path / "x.jsonl", rows)
    done = compact(tmp_path)
    assert (done.path, done.rows, done.problems) == (tmp_path / "records.parquet", 2, [])
    described = query(done.path, "SELECT column_name, column_type FROM (DESCRIBE SELECT * FROM read_parquet($1))")
    assert described == [(name, TYPES[kind]) for name, kind in COLUMNS.items()]
    values = query(
        done.path, "SELECT error_max, error_w1, null_max, plan, seed, causal FROM read_parquet($1) ORDER BY id"
    )
    assert math.isnan(values[0][0])
    assert values[0][1:] == (math.inf, -math.inf, "é𝄞", 3, True)
    assert values[1] == (None,) * 6


def test_a_compacted_folder_is_the_same_folder(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for row in make_records(5):
            store.append(row)
        before = read_records(tmp_path)
        compact(tmp_path)
        assert read_records(tmp_path) == before
        store.append(make_record(id="later", time="2027"))  # the run goes on
        assert [row["id"] for row in read_records(tmp_path).rows][-2:] == ["point-4", "later"]
        assert Store(tmp_path).done == store.done
        assert compact(tmp_path).rows == 6
    once = (tmp_path / "records.parquet").read_bytes()
    assert compact(tmp_path).rows == 6
    assert (tmp_path / "records.parquet").read_bytes() == once
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".parquet"]
    next(tmp_path.glob("*.jsonl")).unlink()  # the Parquet file alone holds all of it
    assert compact(tmp_path).rows == len(read_records(tmp_path).rows) == 6
    assert all(equal(one, other) for one, other in zip(read_records(tmp_path).rows, before.rows, strict=False))


def test_problems_are_handed_on(tmp_path: Path) -> None:
    write_lines(tmp_path / "x.jsonl", make_records(2))
    (tmp_path / "y.jsonl").write_text("nonsense\n")
    done = compact(tmp_path)
    assert done.rows == 2
    assert [problem.split(":")[0] for problem in done.problems] == ["y.jsonl"]


def test_another_parquet_file_is_reported(tmp_path: Path) -> None:
    write_lines(tmp_path / "x.jsonl", make_records(2))
    compact(tmp_path)
    with duckdb.connect() as connection:
        connection.sql("SELECT 1 AS schema, 'a' AS id").write_parquet(str(tmp_path / "a.parquet"))
        theirs = connection.read_parquet(str(tmp_path / "records.parquet"))
        theirs.project("* REPLACE (schema + 1 AS schema)").write_parquet(str(tmp_path / "b.parquet"))
        theirs.project("* REPLACE (seed::DOUBLE AS seed)").write_parquet(str(tmp_path / "c.parquet"))
        theirs.project("* EXCLUDE (seed)").write_parquet(str(tmp_path / "d.parquet"))
    found = read_records(tmp_path)
    assert len(found.rows) == 2
    columns = "its columns are not those of schema 1, which this version reads; it was left out."
    assert found.problems == [
        f"a.parquet: {columns}",
        "b.parquet: 2 of its rows are of another schema or have no id, and were left out.",
        f"c.parquet: {columns}",
        f"d.parquet: {columns}",
    ]


@pytest.mark.parametrize("content", [b"", b"my thesis", b"PAR1....PAR1"])
def test_a_file_that_it_did_not_write_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    write_lines(tmp_path / "x.jsonl", make_records(2))
    (tmp_path / "records.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"not a Parquet file .* Move it away"):
        compact(tmp_path)
    assert (tmp_path / "records.parquet").read_bytes() == content


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "x.jsonl", make_records(2))
    compact(tmp_path)
    before = (tmp_path / "records.parquet").read_bytes()
    write_lines(tmp_path / "y.jsonl", make_records(2, "other"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"must be writable, but: .*No space left"):
        compact(tmp_path)
    assert (tmp_path / "records.parquet").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.parquet", "x.jsonl", "y.jsonl"]


def test_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    for name in ("it's [1]*?", "x=1", 'say "ü"'):
        folder = tmp_path / name
        folder.mkdir()
        write_lines(folder / "x.jsonl", make_records(2))
        assert compact(folder) == (folder / "records.parquet", 2, [])
        (folder / "x.jsonl").unlink()
        assert len(read_records(folder).rows) == 2


app = typer.Typer()
app.command()(command)
run = CliRunner().invoke


def test_the_command(tmp_path: Path) -> None:
    write_lines(tmp_path / "x.jsonl", make_records(2))
    (tmp_path / "[bold].jsonl").write_text("nonsense\n")
    done = run(app, [str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout.strip() == f"{tmp_path / 'records.parquet'}: 2 records"
    assert "Left out: [bold].jsonl: 1 of its 1 lines are not records" in done.stderr
    done = run(app, [str(tmp_path), "--json"])
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert (printed["path"], printed["rows"]) == (str(tmp_path / "records.parquet"), 2)
    assert [problem.split(":")[0] for problem in printed["problems"]] == ["[bold].jsonl"]


def test_the_command_refuses_a_bad_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, what in (("missing", "does not exist"), ("file", "is a file"), ("empty", "has none")):
        done = run(app, [str(tmp_path / name)])
        assert done.exit_code == 2
        assert done.stdout == ""
        assert what in done.stderr
        assert "Give the folder that a sweep wrote into" in done.stderr
        assert "Traceback" not in done.stderr
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_command_without_duckdb_says_what_to_install(tmp_path: Path) -> None:
    write_lines(tmp_path / "x.jsonl", make_records(2))
    program = (
        "import sys; sys.modules['duckdb'] = None\n"
        "import typer; from assay.cli.compact import compact; typer.run(compact)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'assay[report]'" in done.stderr
    assert "Traceback" not in done.stderr
