"""The folder as a database, in one process."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.results.record import from_json, to_json
from assay.results.schema import Schema
from assay.results.store import Store, StoreError
from tests.results.processes import ids_on_disk
from tests.results.records import make_record, make_records, write_lines
from tests.results.strategies import TEXT


def test_rows_are_lines_of_one_file_a_process(tmp_path: Path) -> None:
    rows = make_records(3)
    with Store(tmp_path / "deep" / "run") as store:
        assert list((tmp_path / "deep" / "run").iterdir()) == []  # the test of the folder leaves nothing behind
        assert store.done == set()
        for row in rows:
            store.append(row)
    (path,) = (tmp_path / "deep" / "run").iterdir()
    assert re.fullmatch(rf"records-\d{{8}}T\d{{6}}Z-[A-Za-z0-9-]+-{os.getpid()}-[0-9a-f]{{4}}\.jsonl", path.name)
    assert [from_json(line) for line in path.read_text(encoding="utf-8").splitlines()] == rows
    assert Store(tmp_path / "deep" / "run").done == {row["id"] for row in rows}


def test_a_row_is_kept_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(make_record(id="a"))
    with pytest.raises(ValueError, match="No row is kept twice, and 'a' is done"):
        store.append(make_record(id="a"))
    with pytest.raises(ValueError, match="'a' is done"):
        Store(tmp_path).append(make_record(id="a"))
    assert ids_on_disk(tmp_path) == ["a"]


def test_rows_that_nobody_resumes_are_not_remembered(tmp_path: Path) -> None:
    with Store(tmp_path, remembers=False) as store:
        for row in make_records(3):
            store.append(row)
        assert store.done == set()
    assert ids_on_disk(tmp_path) == [row["id"] for row in make_records(3)]
    assert Store(tmp_path, remembers=False).done == set()


@pytest.mark.parametrize(
    "record", [make_record(id=None), make_record(time=None), make_record(schema=2), make_record(batch="3"), {"id": "a"}]
)
def test_what_is_no_record_is_not_written(tmp_path: Path, record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        Store(tmp_path).append(record)
    assert list(tmp_path.iterdir()) == []


def test_refresh_finds_what_others_append(tmp_path: Path) -> None:
    mine, other = Store(tmp_path), Store(tmp_path)
    mine.append(make_record(id="a"))
    assert mine.refresh() == set()  # its own rows are no news
    assert other.refresh() == {"a"}
    other.append(make_record(id="b"))
    mine.append(make_record(id="c"))
    assert mine.refresh() == {"b"}
    assert other.refresh() == {"c"}
    assert other.refresh() == set()
    assert mine.done == other.done == {"a", "b", "c"}


def test_refresh_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "other.jsonl", make_records(50))
    store = Store(tmp_path)
    parsed: list[bytes] = []
    monkeypatch.setattr(Schema, "id_of", lambda schema, line: parsed.append(line))
    store.refresh()
    assert parsed == []
    with path.open("ab") as file:
        file.write(b"new\n")
    store.refresh()
    assert parsed == [b"new\n"]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    line = to_json(make_record(id="a")).encode()
    path = tmp_path / "other.jsonl"
    path.write_bytes(line[:100])
    assert store.refresh() == set()
    path.write_bytes(line)  # whole but for its end: still not known to be whole
    assert store.refresh() == set()
    path.write_bytes(line + b"\n" + line[:7])
    assert store.refresh() == {"a"}


@given(st.lists(TEXT, unique=True, min_size=1, max_size=4), st.data())
@settings(max_examples=40)
def test_any_cut_of_a_file_loses_only_the_row_it_cuts(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str], data: st.DataObject
) -> None:
    """As after a crash at any byte: the rows before are done, the rest is not."""
    folder = tmp_path_factory.mktemp("cut")
    lines = [to_json(make_record(id=identity)).encode() + b"\n" for identity in ids]
    cut = data.draw(st.integers(0, len(b"".join(lines))))
    (folder / "records.jsonl").write_bytes(b"".join(lines)[:cut])
    whole = [identity for i, identity in enumerate(ids) if len(b"".join(lines[: i + 1])) <= cut]
    assert Store(folder).done == set(whole)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"5",
        b'{"schema": 1, "id": "a"}',
        to_json(make_record(id="a")).replace('"schema": 1', '"schema": 2').encode(),
        to_json(make_record(id="a")).replace('"id": "a"', '"id": ["a"]').encode(),
    ],
)
def test_lines_that_are_no_records_are_passed_over(tmp_path: Path, line: bytes) -> None:
    good = [to_json(make_record(id=identity)).encode() for identity in ("b", "c")]
    (tmp_path / "x.jsonl").write_bytes(good[0] + b"\n" + line + b"\n" + good[1] + b"\n")
    assert Store(tmp_path).done == {"b", "c"}


def test_a_file_that_was_rewritten_is_read_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", make_records(3))
    store = Store(tmp_path)
    write_lines(path, [make_record(id="new")])
    assert store.refresh() == {"new"}


def test_other_files_and_folders_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "notes.txt").write_text(to_json(make_record(id="a")) + "\n")
    os.mkfifo(tmp_path / "pipe.jsonl")  # reading it would never end
    assert Store(tmp_path).done == set()


def test_a_file_deleted_under_a_run_is_not_written_to(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(make_record(id="a"))
    next(tmp_path.iterdir()).unlink()
    store.append(make_record(id="b"))
    assert ids_on_disk(tmp_path) == ["b"]


@pytest.mark.parametrize("place", ["file", "file/below", "file/deep/below"])
def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"need a folder .*file.*Choose another folder"):
        Store(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="needs a folder that even root cannot write to")
@pytest.mark.parametrize("place", ["/proc/self/fdinfo", "/proc/assay/run"])
def test_a_folder_that_cannot_be_written_to_is_refused_at_once(place: str) -> None:
    with pytest.raises(StoreError, match=rf"need a folder that can be written to, but {place}: "):
        Store(Path(place))


@pytest.mark.parametrize("written", [0, 1, 500])
def test_a_short_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    store = Store(tmp_path)
    store.append(make_record(id="a"))
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:written]))
    with pytest.raises(StoreError, match=rf"{path.name}: .*only {written} of a row's .* Make room"):
        store.append(make_record(id="b"))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert store.done == {"a"}
    store.append(make_record(id="b"))  # there is room again
    assert ids_on_disk(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    store = Store(tmp_path)
    store.append(make_record(id="a"))
    write = os.write

    def interrupted(descriptor: int, data: bytes) -> int:
        write(descriptor, data[:20])
        raise error

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(StoreError if isinstance(error, OSError) else KeyboardInterrupt):
        store.append(make_record(id="b"))
    monkeypatch.undo()
    assert store.done == {"a"}
    store.append(make_record(id="b"))
    assert ids_on_disk(tmp_path) == ["a", "b"]
    assert len(list(tmp_path.iterdir())) == 1


def test_half_a_row_that_cannot_be_taken_back_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.append(make_record(id="a"))
    write = os.write

    def broken(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    monkeypatch.setattr(os, "ftruncate", broken)
    with pytest.raises(StoreError, match="only 20 of"):
        store.append(make_record(id="b"))
    monkeypatch.undo()
    store.append(make_record(id="b"))  # into a new file
    assert sorted(ids_on_disk(tmp_path)) == ["a", "b"]
    assert Store(tmp_path).done == {"a", "b"}
