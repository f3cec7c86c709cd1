"""Samples from a folder: what is whole is shown, what is not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay.report.pictures import read_pictures
from tests.report.trained import png


def listed(folder: Path, entries: Any) -> Path:
    (folder / "samples").mkdir()
    (folder / "samples" / "samples.json").write_text(json.dumps(entries))
    (folder / "samples" / "grid.png").write_bytes(png())
    return folder


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "file": "grid.png",
        "title": "After 20 steps",
        "captions": ["a cat", "a dog"],
        "attribution": "Me",
    } | changes


def test_pictures_with_their_words(tmp_path: Path) -> None:
    (found,), problems = read_pictures(listed(tmp_path, [entry()]))
    assert problems == []
    assert found.described == "After 20 steps: a cat; a dog"
    assert found.attribution == "Me"
    assert found.address.startswith("data:image/png;base64,iVBOR")


def test_a_folder_without_samples_says_nothing(tmp_path: Path) -> None:
    assert read_pictures(tmp_path) == ([], [])


@pytest.mark.parametrize(
    "file", ["../secret.png", "/etc/secret.png", "a\\b.png", "grid.svg", "gone.png", "", "..", "link.png"]
)
def test_only_files_of_the_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    folder = listed(tmp_path, [entry(file=file), entry()])
    (folder / "samples" / "link.png").symlink_to(tmp_path / "secret.png")
    found, (problem,) = read_pictures(folder)
    assert [picture.file for picture in found] == ["grid.png"]
    assert "left out" in problem


@pytest.mark.parametrize(
    "data", [b"", b"<svg/>", png()[:-5], png()[:40], png().replace(b"IDAT", b"IDAX"), png()[:20] + b"\7" + png()[21:]]
)
def test_a_broken_picture_is_left_out(tmp_path: Path, data: bytes) -> None:
    folder = listed(tmp_path, [entry()])
    (folder / "samples" / "grid.png").write_bytes(data)
    found, (problem,) = read_pictures(folder)
    assert found == []
    assert "'grid.png' is not a whole PNG" in problem


@pytest.mark.parametrize("entries", [{}, "text", None, 3])
def test_a_list_that_is_none(tmp_path: Path, entries: Any) -> None:
    found, (problem,) = read_pictures(listed(tmp_path, entries))
    assert found == []
    assert "must be a list" in problem


def test_entries_that_are_none(tmp_path: Path) -> None:
    found, problems = read_pictures(listed(tmp_path, [3, {}, entry(captions=7), entry(captions="one", title=None)]))
    assert len(problems) == 3
    assert (found[0].captions, found[0].title) == (("one",), "grid.png")


def test_json_that_is_none(tmp_path: Path) -> None:
    folder = listed(tmp_path, [])
    (folder / "samples" / "samples.json").write_bytes(b"\xff{")
    found, (problem,) = read_pictures(folder)
    assert found == []
    assert "cannot be read" in problem
