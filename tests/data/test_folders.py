"""Folders of images: captions beside them and in tables, and everything that can be wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from assay.data.images import from_folder
from tests.data.files import BLUE, RED, png, png_header


def fill(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def test_captions_beside_the_images(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {
        "b/z.JPG": png(BLUE, kind="JPEG"),
        "b/z.txt": "  a blue\n square\x1b[0m ",
        "a.png": png(),
        "a.txt": "﻿red",
    }
    found = from_folder(fill(tmp_path / "mine", {**files, "README.txt": "no caption of anything"}), 8)
    assert (found.name, found.captions, found.skipped) == ("mine", ("red", "a blue square[0m"), ())
    assert found.images.shape == (2, 3, 8, 8)
    assert tuple(found.images[0, :, 0, 0].tolist()) == RED
    assert found.images[1, 2].float().mean() > 150
    assert "mine" in found.attribution
    assert found.sha256() == from_folder(tmp_path / "mine", 8).sha256()


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("captions.csv", 'file_name,caption\na.png,"one, two"\n./s/b.png,three\n../../etc/passwd,x\nc.png,\n'),
        (
            "captions.jsonl",
            '{"file": "a.png", "text": "one, two"}\n\n{"image": "s\\\\b.png", "captions": ["three", "x"]}\n'
            '{"file": "../../etc/passwd", "text": "x"}\nnonsense\n',
        ),
    ],
)
def test_captions_in_a_table(tmp_path: Path, table: str, text: str) -> None:
    found = from_folder(fill(tmp_path, {"a.png": png(), "s/b.png": png(), "c.png": png(), table: text}), 4)
    assert found.captions == ("one, two", "three")
    assert found.skipped == (
        f"{table} line 4: no image ../../etc/passwd in the folder",
        f"{table} line 5: no image or no caption named",
        "c.png: no caption",
    )


def test_a_caption_beside_goes_before_the_table(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {"a.png": png(), "a.txt": "beside", "captions.csv": "file,text\na.png,table\n"}
    assert from_folder(fill(tmp_path, files), 4).captions == ("beside",)


def test_bad_images_are_skipped_and_named(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {
        "good.png": png(),
        "bad.png": b"no image",
        "bomb.png": png_header(60000, 60000),
        "half.png": png()[:40],
        "mute.png": png(),
        "blank.png": png(),
        "latin.png": png(),
        "latin.txt": b"caf\xe9",
    }
    for name in ("good", "bad", "bomb", "half"):
        files[f"{name}.txt"] = name
    folder = fill(tmp_path, {**files, "blank.txt": " \n"})
    with open(folder / "huge.png", "wb") as file:
        file.truncate(2**40)  # takes no room
    (folder / "huge.txt").write_text("huge")
    found = from_folder(folder, 4)
    assert found.captions == ("good",)
    assert [line.split(":")[0] for line in found.skipped] == [
        "bad.png",
        "blank.png",
        "bomb.png",
        "half.png",
        "huge.png",
        "latin.png",
        "mute.png",
    ]
    assert "more than 64 MiB" in found.skipped[4]


@pytest.mark.skipif(os.name != "posix", reason="names and links of POSIX")
def test_odd_names_links_and_pipes(tmp_path: Path) -> None:
    odd = "a\n\x1b[31m é 🦊"
    folder = fill(
        tmp_path / "set", {f"{odd}.png": png(), f"{odd}.txt": "odd", "x.txt": "x", "p.txt": "p", "l.txt": "l"}
    )
    fill(tmp_path, {"elsewhere.png": png(BLUE)})
    (folder / "l.png").symlink_to(tmp_path / "elsewhere.png")
    (folder / "x.png").symlink_to("nowhere")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "p.png")
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.png"))).write_bytes(png())
    found = from_folder(folder, 4)
    assert found.captions == ("odd", "l")
    assert found.skipped[:2] == ("p.png: not a file", "x.png: No such file or directory")
    assert found.skipped[2:] == ("\\udcff.png: no caption",)
    "".join(found.skipped).encode()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "set must hold images .*name.txt beside name.png.*none were found.$"),
        ({"a.txt": "a"}, "none were found.$"),
        ({"a.png": png()}, r"none were found. Left out: a.png: no caption\.$"),
        ({"a.png": b"", "a.txt": "a"}, "Left out: a.png: no image of a known format"),
        ({f"{i}.png": png() for i in range(5)}, "2.png: no caption and 2 more"),
        ({"a.png": png(), "captions.csv": "x,y\n1,2\n"}, r"captions.csv cannot be read. .* got \['x', 'y'\]"),
        ({"a.png": png(), "captions.csv": b"file,text\na.png,caf\xe9"}, "must be UTF-8"),
        ({"a.png": png(), "captions.csv": "", "captions.jsonl": ""}, "one table"),
        ({"a.png": png(), "captions.csv": "file,text\n" + "x" * 200_000}, "plain CSV, but line 1"),
        ({"a.png": png(), "captions.jsonl": "[" * 100_000}, "no image or no caption named"),
    ],
)
def test_nothing_to_use_is_an_error(tmp_path: Path, files: dict[str, bytes | str], message: str) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match=message):
        from_folder(fill(tmp_path / "set", files), 4)


def test_no_folder_and_no_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"from a folder, but .*missing is none"):
        from_folder(tmp_path / "missing", 4)
    for size in (0, 2000, 4.0, True):
        with pytest.raises(ValueError, match=r"1 to 1024, got"):
            from_folder(tmp_path, size)  # type: ignore[arg-type]
