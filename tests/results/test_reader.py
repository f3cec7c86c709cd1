"""Records come back from a folder as they went in, and what is wrong in it is said."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from assay.results.reader import read_records
from assay.results.record import COLUMNS, Record, from_json, to_json
from assay.results.store import Store
from tests.results.records import equal, make_record, make_records, write_lines
from tests.results.strategies import records

pytest.importorskip("duckdb")


@given(st.lists(records(), min_size=1, max_size=20, unique_by=lambda record: record["id"]))
@example([make_record(id=value, error_max=float(value)) for value in ("nan", "inf", "-inf", "-0.0", "5e-324", "1e308")])
@example([make_record(id=text, plan=text) for text in ('"', "\\", "\0", "\n", "é", "𝄞", "\u2028", "null", "'); DROP")])
@example([make_record(id=str(seed), seed=seed) for seed in (2**63 - 1, -(2**63), 0)])
@settings(max_examples=15)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[Record]) -> None:
    folder = tmp_path_factory.mktemp("run")
    with Store(folder) as store:
        for row in rows:
            store.append(row)
    found = read_records(folder)
    assert found.problems == []
    expected = sorted(rows, key=lambda row: (row["time"], row["id"]))
    assert len(found.rows) == len(expected)
    for one, other in zip(found.rows, expected, strict=True):
        assert equal(one, other)


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n  \n\n")
    (tmp_path / "notes.txt").write_text("not looked at")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert read_records(tmp_path) == ([], [])


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing does not exist\. Give the folder"):
        read_records(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file is a file\. Give the folder"):
        read_records(tmp_path / "file")


def test_every_record_once_the_first_by_time(tmp_path: Path) -> None:
    late = make_record(id="a", time="2026-11-15T09:00:00+00:00", seed=9)
    early = make_record(id="a", time="2026-11-15T08:00:00+00:00", seed=8)
    other = make_record(id="b", time="2026-11-15T08:30:00+00:00")
    write_lines(tmp_path / "1.jsonl", [late, other])
    write_lines(tmp_path / "2.jsonl", [early, early])
    assert read_records(tmp_path) == ([early, other], [])


def test_chosen_columns(tmp_path: Path) -> None:
    write_lines(tmp_path / "1.jsonl", make_records(3))
    assert read_records(tmp_path, ["seed", "id"]).rows == [{"seed": 3, "id": f"point-{i}"} for i in range(3)]
    with pytest.raises(ValueError, match=r"some of the schema's, got \['sead'\]"):
        read_records(tmp_path, ["sead"])


CUT = r"x\.jsonl: its last line has no end and was left out: the process was stopped while it wrote the row"


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        (to_json(make_record(id="z"))[:1], CUT),
        (to_json(make_record(id="z"))[:100], CUT),
        (to_json(make_record(id="z"))[:-1], CUT),
        (to_json(make_record(id="z")).replace('"schema": 1', '"schema": 7') + "\n", r"schema 7; this version reads"),
        (to_json(make_record(id="z")).replace('"schema": 1, ', "") + "\n", r"no schema"),
        (to_json(make_record(id="z"))[:100] + "\n", r"line 4: not JSON"),
        (to_json(make_record(id="z")) * 2 + "\n", r"not JSON \(Extra data"),
        ('{"some": "thing"}\n', r"1 of its 4 lines are not records and were left out \(line 4: .* no schema"),
        ("\n\nnonsense", r"1 of its 4 lines .*line 6: not JSON"),
        ("[" * 50_000 + "\n", r"line 4: not JSON"),
        ("x" * 20_000_000 + "\n", r"1 of its 4 lines .*line 4: longer than the \d+ bytes that a record may have"),
        ("\0" * 5000 + "\n", r"line 4: not JSON"),
        ("\udcff\udcfe\n", r"line 4: not text in UTF-8"),
        ("5\nnull\ntrue\n" + to_json(make_record(id="z"))[:100], r"4 of its 7 lines .*Its last line has no end"),
        (json.dumps(make_record(id="z", batch=2**63)) + "\n", r"column batch must fit into 64 bits"),
        (json.dumps(make_record(id="z", batch=10**30)) + "\n", r"column batch must fit into 64 bits"),
        (json.dumps(make_record(id="z", plan="\ud800")) + "\n", r"text that UTF-8 can write"),
        (json.dumps(make_record(id=None)) + "\n", r"column id must be str, got None"),
    ],
)
def test_what_is_wrong_is_said_and_the_rest_is_read(tmp_path: Path, tail: str, problem: str) -> None:
    good, others = make_records(3), make_records(2, "other")
    path = write_lines(tmp_path / "x.jsonl", good)
    with path.open("ab") as file:
        file.write(tail.encode("utf-8", "surrogateescape"))
    write_lines(tmp_path / "y.jsonl", others)
    found = read_records(tmp_path)
    assert sorted(row["id"] for row in found.rows) == sorted(row["id"] for row in good + others)
    assert len(found.problems) == 1
    assert found.problems[0].startswith("x.jsonl: ")
    assert re.search(problem, found.problems[0])
    assert len(found.problems[0]) < 1000


def test_a_line_that_only_lacks_its_end_is_a_record(tmp_path: Path) -> None:
    """Editors leave that; a row that is cut cannot be whole JSON."""
    (tmp_path / "x.jsonl").write_text(to_json(make_record(id="a")))
    found = read_records(tmp_path)
    assert [row["id"] for row in found.rows] == ["a"]
    assert found.problems == []


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "b.jsonl").write_text("[\n  1,\n  2\n]\n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 nonsense PAR1")
    (tmp_path / "d.jsonl").symlink_to(tmp_path / "gone")  # is no file, so it is not looked at
    write_lines(tmp_path / "e.jsonl", make_records(2))
    found = read_records(tmp_path)
    assert len(found.rows) == 2
    assert [problem.split(":")[0] for problem in found.problems] == ["a.jsonl", "b.jsonl", "c.parquet"]
    assert "4 of its 4 lines" in found.problems[1]
    assert "not a Parquet file" in found.problems[2]


ODD = [
    "a b",
    "it's",
    'say "x"',
    "[1]",
    "[!a]",
    "*",
    "?",
    "a\\[b]",
    "back\\slash",
    "x=1",
    "ünï→",
    "$HOME",
    "~",
    "a\nb",
    "%41",
]


def test_odd_names_of_files_and_folders(tmp_path: Path) -> None:
    """Some are patterns to DuckDB, and match their neighbours; one would become a column."""
    for i, name in enumerate(ODD):
        folder = tmp_path / name
        folder.mkdir()
        for j, file in enumerate(ODD):
            if i == j or i % 7 == 0:
                write_lines(folder / f"{file}.jsonl", [make_record(id=f"{name}/{file}")])
    for i, name in enumerate(ODD):
        found = read_records(tmp_path / name)
        files = [file for j, file in enumerate(ODD) if i == j or i % 7 == 0]
        assert [row["id"] for row in found.rows] == sorted(f"{name}/{file}" for file in files)
        assert found.problems == []


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    try:
        write_lines(path, make_records(2))
    except OSError:
        pytest.skip("the file system takes only text")
    assert len(read_records(tmp_path).rows) == 2
    path.write_bytes(b"nonsense\n")
    (problem,) = read_records(tmp_path).problems
    assert problem.startswith("\\udcff.jsonl: 1 of its 1 lines")


def any_value(column: str) -> st.SearchStrategy[Any]:
    """What a hand, a bug or another program may put into a column."""
    odd: list[Any] = [
        None,
        True,
        1,
        1.0,
        1.5,
        -0.0,
        2**63,
        10**30,
        "1",
        "1.5",
        "nan",
        "NaN",
        "Infinity",
        "inf",
        "true",
        "",
        [],
        {},
    ]
    return st.tuples(st.just(column), st.sampled_from(odd))


CHANGES = st.lists(st.sampled_from(sorted(COLUMNS)).flatmap(any_value), max_size=2)
FORMS = st.sampled_from(["as is", "compact", "sorted", "spaced", "escaped", "short", "long", "twice"])


def write_oddly(record: Record, form: str) -> str:
    if form == "compact":
        return json.dumps(record, separators=(",", ":"))
    if form == "sorted":
        return json.dumps(record, sort_keys=True)
    if form == "spaced":
        return f"  {json.dumps(record)}\t\r"
    if form == "escaped":
        return json.dumps(record | {"plan": "é𝄞"}, ensure_ascii=True)
    if form == "short":
        return json.dumps(dict(itertools.islice(record.items(), len(record) - 1)))
    if form == "long":
        return json.dumps(record | {"more": 1})
    if form == "twice":
        return json.dumps(record)[:-1] + ', "seed": 17}'
    return json.dumps(record, ensure_ascii=False)


def oracle(line: str) -> Record | None:
    """What `from_json` says."""
    try:
        return from_json(line)
    except ValueError:
        return None


@given(st.lists(st.tuples(CHANGES, FORMS), min_size=1, max_size=30))
@settings(max_examples=25)
def test_duckdb_and_from_json_agree_on_what_a_record_is(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[list[tuple[str, Any]], str]]
) -> None:
    """DuckDB alone takes "5" for 5 and 1.5 for 2, and does not miss a missing column."""
    folder = tmp_path_factory.mktemp("run")
    texts = [write_oddly(make_record(id=f"{i:03}") | dict(changes), form) for i, (changes, form) in enumerate(lines)]
    for i, text in enumerate(texts):  # one file each: a bad line must not help the others
        (folder / f"{i:03}.jsonl").write_text(text + "\n", encoding="utf-8")
    expected: dict[str, Record] = {}
    for text in texts:
        record = oracle(text)
        if record is not None:
            known = expected.setdefault(record["id"], record)
            expected[record["id"]] = min(known, record, key=lambda row: str(row["time"]))
    found = read_records(folder)
    assert len(found.problems) == sum(oracle(text) is None for text in texts)
    assert {row["id"] for row in found.rows} == set(expected)
    for row in found.rows:
        assert equal(row, expected[row["id"]])


def test_many_rows_are_read_in_seconds(tmp_path: Path) -> None:
    """Goal: 100 000 in a few seconds. A fifth of them here; the bound leaves room for a busy machine."""
    count = 20_000
    start, end = to_json(make_record(id="ID")).split("ID")
    (tmp_path / "x.jsonl").write_text("".join(f"{start}{i}{end}\n" for i in range(count)))
    began = time.perf_counter()
    found = read_records(tmp_path)
    took = time.perf_counter() - began
    assert len(found.rows) == count
    assert took < 5, f"{count} rows took {took:.1f} s"
