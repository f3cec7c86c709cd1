"""The picture and the table of a made-up record."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.plot_record import main, markdown, picture
from benchmarks.record import FLEX, Record
from tests.benchmarks.samples import ENVIRONMENT, record


def words_of(svg: bytes) -> list[str]:
    return [
        "".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")
    ]


def test_picture_names_everybody_the_device_and_every_panel() -> None:
    svg = picture(record(), "svg")
    words = words_of(svg)
    for word in (
        "assay",
        "cuDNN",
        "FA2",
        "FlexAttention",
        "D 64",
        "D 128",
        "D 256",
        "Attention in bf16 on one Made-up GPU",
    ):
        assert words.count(word) == 1
    assert any("cuDNN 9.19.0" in word for word in words)
    assert words.count("length N") == 3
    assert {w for w in words if w.startswith(("Forward", "Backward"))} == {
        f"{part}, {mask}" for part in ("Forward", "Backward") for mask in ("full", "causal")
    }
    assert svg == picture(record(), "svg")  # the same bytes again


def test_who_was_not_measured_is_not_in_the_legend() -> None:
    made = record()
    for point in made.points:
        point.ms.pop(FLEX, None)
    assert "FlexAttention" not in words_of(picture(made, "svg"))


def test_picture_of_a_part(tmp_path: Path) -> None:
    made = record()
    made.points = [p for p in made.points if p.part == "forward" and p.kind == "plain" and p.causal and p.dim == 128]
    made.write(tmp_path / "record.json")
    main([str(tmp_path / "record.json"), str(tmp_path / "record.png")])
    assert (tmp_path / "record.png").read_bytes().startswith(b"\x89PNG")
    assert words_of(picture(made, "svg")).count("length N") == 1


def test_table_has_the_ratios_and_the_goals() -> None:
    made = record(1.16)
    text = markdown(made)
    assert "| forward, D 128 | 651 / 634 | 87% / 75% | 1.16–1.16, mean 1.16 |" in text
    assert "| forward over cuDNN, mean | ≥ 1.15 | 1.160 (36) | met |" in text
    assert "| backward D 64, 128 over cuDNN, mean | ≥ 1.18 | 1.160 (24) | **missed** |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {7, 5}  # each table of one width
    assert re.search(r"matmul 750 TFLOP/s", text)


def test_bad_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = tmp_path / "nothing.json"
    Record(date="2026-01-02", environment=dict(ENVIRONMENT)).write(nothing)
    for words, told in (
        ([str(nothing)], "Name a file for the picture"),
        ([str(nothing), "out.pdf"], "must be an .svg or a .png"),
        ([str(nothing), str(tmp_path / "out.svg")], "this record has none"),
        ([str(tmp_path / "absent.json"), "out.svg"], "No such file"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        assert told in capsys.readouterr().err
