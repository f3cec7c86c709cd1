"""Writing the report: all files, each whole or not at all; and what the Markdown says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import assay.report.build
from assay.report.build import write_report
from assay.report.markdown import text
from tests.report.samples import attribution, claim, row, seeds
from tests.report.test_page import picture
from tests.report.trained import trained
from tests.test_structure import run_without


def test_report(tmp_path: Path) -> None:
    rows = [r | {"error_max": 8.0 + r["seed"], "baseline_error_max": 2.0} for r in seeds([1.0, 2.0], format="bf16")]
    rows += [r | {"inputs": "normal"} for r in rows]
    folder = tmp_path / "new" / "report"
    claims = [claim(ours=("a | b", "c")), claim(number="C2", verdict="does not hold")]
    found = write_report(
        rows,
        claims,
        [attribution()],
        folder,
        asked="Why?",
        verdict="Because.",
        problems=["bad *line*"],
        command="assay x",
    )
    assert found == folder / "index.html"
    assert {path.name for path in folder.iterdir()} == {"index.html", "report.md", "figures"}
    assert found.stat().st_size < 6_000_000
    assert found.stat().st_mode & 0o777 == 0o644
    said = (folder / "report.md").read_text(encoding="utf-8")
    assert "| C1 (Fig 3) | It falls. | falls | a \\| b; c | holds | It does. [The chart](#figure-3-" in said
    assert "| output\\_accumulator | 61% \\[59, 63\\] | 10% \\[8, 12\\] | 5% \\[3, 7\\] | 5 |" in said
    assert "**the running output owns 61% \\[59, 63\\] of the mean square error**" in said
    assert "| bf16 | flash | 8.49 | \\[4.02, 17.9\\] | 2 |" in said  # the geometric mean of 8 and 9
    assert "bad \\*line\\*" in said
    assert "`assay sweep length`" in said
    images = re.findall(r"\]\((figures/[^)]+)\)", said)
    assert len(images) == 5
    assert all((folder / image).is_file() for image in images)
    assert len(list((folder / "figures").iterdir())) == 2 * len(images)


def test_training_in_the_markdown(tmp_path: Path) -> None:
    pictures = [picture(title="<b>one</b>", attribution="A | B")]
    write_report(
        [], [claim(anchor="figure-8")], [], tmp_path, asked="", verdict="", training=trained(), pictures=pictures
    )
    said = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "[The chart](#figure-8-every-pair-over-training)" in said
    assert "- flash: its weights drift less" in said
    assert re.search(r"\| FP16 ↔ FP32 \| precision: fp16 \| 3 \| .* \| 3× \\\[3, 3\\\] \| 3× \\\[3, 3\\\] \|", said)
    assert "| layer | step 1 | step 10 | step 20 |" in said
    assert "| step | flash | other initialisation |" in said
    assert "![\\<b\\>one\\</b\\>: a cat; a dog](samples/grid.png)\n\nA \\| B" in said
    assert "| records | 1" not in said
    images = re.findall(r"\]\((figures/[^)]+)\)", said)
    assert {"figures/figure-7.svg", "figures/figure-8-weights.svg", "figures/layers-flash.svg"} <= set(images)
    assert all((tmp_path / image).is_file() for image in images)


def test_needs_no_torch() -> None:
    done = run_without({"torch", "duckdb", "triton", "matplotlib", "plotly", "numpy"}, "import assay.report.build")
    assert done.returncode == 0, done.stderr


def test_what_the_page_is_made_of_is_installed() -> None:
    """A wheel holds only what pyproject.toml names."""
    folder = Path(assay.report.build.__file__).parent
    project = tomllib.loads((folder.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["package-data"]["assay.report"]
    assert sorted(listed) == sorted(path.name for path in folder.iterdir() if path.suffix not in (".py", ""))


def test_no_records_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at least one record.*assay sweep"):
        write_report([], [], [], tmp_path / "report", asked="", verdict="")
    assert list(tmp_path.iterdir()) == []


def test_records_of_no_figure_still_make_a_page(tmp_path: Path) -> None:
    found = write_report([row(sweep="mine")], [], [], tmp_path, asked="Why?", verdict="None.")
    assert "assay sweep precision" in found.read_text(encoding="utf-8")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "index.html"
    target.write_text("old")

    def full(source: str, destination: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_report([row(sweep="mine")], [], [], tmp_path, asked="", verdict="")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@given(st.text())
def test_markdown_text_means_itself(value: str) -> None:
    made = text(value)
    assert "\n" not in made
    assert re.sub(r"\\(.)", r"\1", made) == " ".join(value.split())
    assert not re.search(r"(?<!\\)(?:\\\\)*[<>|`*_\[\]&]", made)
