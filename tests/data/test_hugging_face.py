"""Hugging Face datasets on the disk. The reading itself needs pyarrow, which the project does not install."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.data.hugging_face import _files_of_split, _image_bytes, from_hugging_face
from tests.data.files import png, png_header


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_the_files_of_a_split(tmp_path: Path) -> None:
    one = touch(
        tmp_path / "one", "data-00001-of-00002.arrow", "data-00000-of-00002.arrow", "cache-1f.arrow", "state.json"
    )
    assert [path.name for path in _files_of_split(one)] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]

    two = touch(tmp_path / "two", "train/data-00000-of-00001.arrow", "test/dataset.arrow")
    with pytest.raises(ValueError, match=r"has 2. Give one: .*two/test, .*two/train\."):
        _files_of_split(two)
    assert _files_of_split(two / "test") == [two / "test/dataset.arrow"]

    hub = touch(tmp_path / "hub", "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"Give one: .*hub/data/test, .*hub/data/train"):
        _files_of_split(hub)
    assert _files_of_split(hub / "data" / "train") == [hub / "data/train-00000-of-00001.parquet"]
    assert _files_of_split(hub / "data/test-00000-of-00001.parquet") == [hub / "data/test-00000-of-00001.parquet"]
    with pytest.raises(ValueError, match=r"missing has none. Save it with save_to_disk"):
        _files_of_split(tmp_path / "missing")


def test_an_image_is_bytes_and_never_a_path() -> None:
    assert _image_bytes({"image": {"bytes": b"x", "path": None}}) == b"x"
    assert _image_bytes({"jpg": b"x"}) == b"x"
    assert _image_bytes({"image": {"bytes": None, "path": "/etc/passwd"}}) is None
    assert _image_bytes({"caption": "x"}) is None


@pytest.mark.parametrize("kind", ["save_to_disk", "parquet"])
def test_what_datasets_wrote(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    rows = {
        "image": [{"bytes": data, "path": None} for data in (png(), b"bad", png_header(60000, 60000), png(), png())],
        "text": ["one", "two", "three", None, "five"],
        "width": [8] * 5,
    }
    features = datasets.Features(image=datasets.Image(), text=datasets.Value("string"), width=datasets.Value("int64"))
    table = datasets.table.InMemoryTable(pyarrow.table(rows, schema=features.arrow_schema))
    made = datasets.Dataset(table, info=datasets.DatasetInfo(features=features), fingerprint="given")
    if kind == "parquet":
        (tmp_path / "set").mkdir()
        made.to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    else:
        made.save_to_disk(tmp_path / "set")
    found = from_hugging_face(tmp_path / "set", 4)
    assert (found.name, found.captions) == ("set", ("one", "five"))
    assert [line.split(": ", 1)[1][:9] for line in found.skipped] == ["no image ", "more than", "no captio"]
    file = next((tmp_path / "set").glob("*.parquet" if kind == "parquet" else "*.arrow"))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"set must hold rows .* broken, not read further"):
        from_hugging_face(tmp_path / "set", 4)
