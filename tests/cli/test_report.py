"""`assay study` and `assay report` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import assay
from tests.results.records import make_records, write_lines
from tests.test_structure import run_without

STUDY = """
from assay.recipes.study import Study
from assay.sweeps.grid import default_sweep

def tiny():
    small = {"length": 64, "dim": 16, "sram": 640, "seeds": 2, "inputs": ("normal",)}
    return Study(
        asked="Is <this> it?",
        sweeps=(default_sweep("precision", formats=("bf16", "fp16"), **small), default_sweep("steps", **small)),
    )
"""


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "mine.py").write_text(STUDY)
    run = folder / "run"
    done = assay("study", f"{folder / 'mine.py'}:tiny", "--out", str(run), "--device", "cpu", "--jobs", "1", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["claims"][0]["number"] == "C1"
    assert answer["claims"][0]["verdict"] == "undecided"  # it has neither FP32 nor FP64
    assert answer["claims"][2]["verdict"] == "not measured here"  # it has no sweep over lengths
    assert "bf16" in answer["verdict"]
    return run


def test_a_study_of_ones_own_leaves_its_report(studied: Path) -> None:
    page = (studied / "index.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "Is &lt;this&gt; it?" in page
    assert "Is <this> it?" not in page
    assert (studied / "report.md").read_text(encoding="utf-8").startswith("#")
    assert {path.suffix for path in (studied / "figures").iterdir()} == {".svg", ".png"}


def test_the_report_is_made_from_the_records_alone_without_torch(studied: Path) -> None:
    (studied / "index.html").unlink()
    program = f"import sys; sys.argv = ['assay', 'report', {str(studied)!r}]; from assay.cli.app import main; main()"
    done = run_without({"torch", "triton", "safetensors"}, program)
    assert done.returncode == 0, done.stderr
    assert str(studied / "index.html") in done.stdout
    assert (studied / "index.html").is_file()


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(studied: Path) -> None:
    bad = studied / "garbage.jsonl"
    bad.write_bytes(b"\x00\x01 not ours\n")
    other = write_lines(studied / "other.jsonl", make_records(1))
    other.write_text(other.read_text().replace('"schema": 1', '"schema": 99'))
    try:
        done = assay("report", str(studied))
        assert done.returncode == 0, done.stderr
        words = " ".join(done.stderr.split())
        assert "garbage.jsonl" in words
        assert "other.jsonl" in words
        assert "schema 99" in words
        assert "garbage.jsonl" in (studied / "index.html").read_text(encoding="utf-8")
    finally:
        bad.unlink()
        other.unlink()


def test_compact_gives_parquet(studied: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    done = assay("compact", str(studied), "--json")
    assert done.returncode == 0, done.stderr
    rows = duckdb.sql(f"select count(*), max(null_max) from read_parquet('{studied / 'records.parquet'}')").fetchall()
    assert rows == [(2 * 2 * 3 * 2 + 2 * 42, 0.0)]


def test_no_records_no_report(tmp_path: Path) -> None:
    done = assay("report", str(tmp_path))
    assert done.returncode == 2
    assert "There are no records in" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_without_the_packages_it_says_how_to_get_them(studied: Path) -> None:
    program = f"import sys; sys.argv = ['assay', 'report', {str(studied)!r}]; from assay.cli.app import main; main()"
    done = run_without({"duckdb"}, program)
    assert done.returncode == 2
    assert "pip install 'assay[report]'" in done.stderr
