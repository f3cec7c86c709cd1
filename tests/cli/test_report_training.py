"""`assay report` on folders with rows of paired training, and the page that `assay pair` ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from assay.cli.reporting import conclude, write
from assay.results.training_record import TRAINING
from tests.cli.test_cli import assay
from tests.report.samples import study
from tests.report.trained import png, trained
from tests.results.records import make_record, write_lines
from tests.test_structure import run_without


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "training-1.jsonl", trained(), TRAINING)
    return tmp_path


def test_training_alone(folder: Path) -> None:
    program = f"import sys; sys.argv = ['assay', 'report', {str(folder)!r}]; from assay.cli.app import main; main()"
    done = run_without({"torch", "triton", "safetensors"}, program)
    assert done.returncode == 0, done.stderr
    assert str(folder / "index.html") in done.stdout
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert 'id="figure-8"' in page
    assert "After 20 steps of training (text_to_image tiny)" in page
    assert "## Paired training" in (folder / "report.md").read_text(encoding="utf-8")
    assert (folder / "figures" / "figure-7.svg").is_file()


def test_beside_a_sweep(folder: Path) -> None:
    known = [row for row in study() if row["sweep"] == "precision"]
    rows = [
        make_record(**{name: value for name, value in row.items() if value is not None} | {"id": f"point {number}"})
        for number, row in enumerate(known)
    ]
    write_lines(folder / "records-1.jsonl", rows)
    written = write(folder)
    assert (len(written.rows), len(written.training)) == (len(rows), len(trained()))
    page = written.page.read_text(encoding="utf-8")
    assert page.index('id="figure-4"') < page.index('id="figure-7"')


def test_samples_and_what_is_wrong_with_them(folder: Path) -> None:
    (folder / "samples").mkdir()
    (folder / "samples" / "grid.png").write_bytes(png())
    listed = [{"file": "grid.png", "title": "<i>", "captions": ["a"], "attribution": "b"}, {"file": "gone.png"}]
    (folder / "samples" / "samples.json").write_text(json.dumps(listed))
    done = assay("report", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["records"] == len(trained())
    assert answer["problems"] == ["A sample was left out: 'gone.png' is not there."]
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert 'alt="&lt;i&gt;: a"' in page
    assert "gone.png" in page


def test_rows_that_lack_figures_are_left_out_and_counted(folder: Path) -> None:
    empty = [row | {"w1": None, "id": f"empty {row['id']}"} for row in trained() if row["pair"] == "flash"]
    write_lines(folder / "training-2.jsonl", [*empty, trained()[0] | {"kind": None, "id": "kindless"}], TRAINING)
    written = write(folder)
    assert len(written.training) == len(trained())
    assert written.problems == [f"{len(empty) + 1} records lack some of their figures and were left out."]


def test_a_pair_ends_with_its_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conclude("pair", folder, asked="Does <it>?", as_json=False, claims=False)
    assert capsys.readouterr().out == f"Report: {folder.resolve() / 'index.html'}\n"
    assert "Does &lt;it&gt;?" in (folder / "index.html").read_text(encoding="utf-8")


def test_as_json_nothing_else_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conclude("study", folder, asked="Does it?", as_json=True, claims=True)
    found = json.loads(capsys.readouterr().out)
    assert {claim["number"]: claim["verdict"] for claim in found["claims"]}["C7"] == "holds"
    assert "training" in found["verdict"]


def test_without_the_packages_the_claims_are_told_and_how_to_get_a_page(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.cli.reporting.can_report", lambda: "plotly not installed; pip install 'assay[report]'")
    conclude("study", folder, asked="Does it?", as_json=False, claims=True)
    said = capsys.readouterr()
    assert "C7 holds" in said.out
    assert "No page: plotly not installed; pip install 'assay[report]'." in said.err
    assert f"assay report {folder}" in said.err
    assert not (folder / "index.html").exists()


def test_a_folder_that_cannot_be_written_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("assay._files.write_whole", full)
    with pytest.raises(typer.Exit):
        conclude("pair", folder, asked="", as_json=False, claims=False)
