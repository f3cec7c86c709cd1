"""WebDataset tars: pairs by key, tricks, broken archives; nothing is ever written."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.data.images import from_tar
from tests.data.files import BLUE, RED, noise, png, write_tar


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_pairs_by_key(tmp_path: Path, mode: str) -> None:
    members = [
        ("d/0001.jpg", png(BLUE, kind="JPEG")),
        ("d/0001.txt", b"blue"),
        ("0002.json", b'{"caption": "from json", "width": 8}'),
        ("0002.png", png()),
        ("0003.cls", b"7"),
        ("0003.json", b'{"text": "from json"}'),
        ("0003.txt", b"from txt"),
        ("0003.PNG", png()),
        ("0004.png", png()),
        ("0003.seg.png", png(BLUE)),
    ]
    found = from_tar(write_tar(tmp_path / "set.tar", members, mode), 8)
    assert (found.name, found.captions) == ("set.tar", ("blue", "from json", "from txt"))
    assert found.skipped == ("0003.seg.png: 0003.PNG is the image of this caption", "0004.png: no caption")
    assert found.images[0, 2].float().mean() > 150
    assert tuple(found.images[2, :, 4, 4].tolist()) == RED


def test_tricks_of_paths_and_links(tmp_path: Path) -> None:
    path = tmp_path / "inside" / "set.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        for name, data in (
            ("../../out.png", png()),
            ("../../out.txt", b"up"),
            ("/root.png", png()),
            ("/root.txt", b"r"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, kind in (("l.png", tarfile.SYMTYPE), ("h.png", tarfile.LNKTYPE), ("p.png", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    found = from_tar(path, 4)
    assert found.captions == ("up", "r")
    assert [line.split(":")[0] for line in found.skipped] == ["l.png", "h.png", "p.png"]
    assert [one.name for one in tmp_path.rglob("*")] == ["inside", "set.tar"]


def test_bombs_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    members = [
        ("a.png", bytes(65 * 2**20)),
        ("a.txt", b"a"),
        ("b.png", png()),
        ("b.txt", b"b"),
        ("c.txt", bytes(2**21)),
    ]
    found = from_tar(write_tar(tmp_path / "set.tar.gz", members, "w:gz"), 4)
    assert (tmp_path / "set.tar.gz").stat().st_size < 2**18
    assert found.captions == ("b",)
    assert found.skipped == ("a.png: more than 64 MiB", "c.txt: more than 1 MiB")


def test_a_header_that_claims_gigabytes_ends_the_reading(tmp_path: Path) -> None:
    good = write_tar(tmp_path / "good.tar", [("b.png", png()), ("b.txt", b"b")]).read_bytes().rstrip(bytes(1))
    good += bytes(-len(good) % 512)
    claim = tarfile.TarInfo("x")
    claim.type, claim.size = tarfile.XHDTYPE, 2**33
    (tmp_path / "set.tar.gz").write_bytes(gzip.compress(good + claim.tobuf(tarfile.GNU_FORMAT) + bytes(2**20)))
    found = from_tar(tmp_path / "set.tar.gz", 4)
    assert found.captions == ("b",)
    assert "set.tar.gz from byte" in found.skipped[0]
    assert "a header of 8589934592 bytes" in found.skipped[0]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_that_breaks_off_gives_what_comes_before(tmp_path: Path, mode: str) -> None:
    pairs = [(f"{i}.{end}", data) for i in range(4) for end, data in (("png", noise(i)), ("txt", b"%d" % i))]
    whole = write_tar(tmp_path / "set.tar", pairs, mode).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) * 2 // 3])
    found = from_tar(tmp_path / "cut.tar", 4)
    assert found.captions in [("0", "1"), ("0", "1", "2")][: 1 if mode == "w" else 2]
    assert any("not read further" in line for line in found.skipped)


def test_a_broken_header_in_the_middle_is_no_end(tmp_path: Path) -> None:
    data = bytearray(write_tar(tmp_path / "a.tar", [("a.png", png()), ("a.txt", b"a"), ("b.png", png())]).read_bytes())
    data[2048] ^= 1  # the name in the third header, whose checksum is now wrong
    (tmp_path / "b.tar").write_bytes(data)
    found = from_tar(tmp_path / "b.tar", 4)
    assert found.captions == ("a",)
    assert found.skipped == ("b.tar from byte 2048: broken, not read further (a header that is none)",)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 10**6), put=st.binary(min_size=1, max_size=12))
def test_any_damage_is_survived(tmp_path: Path, where: int, put: bytes) -> None:
    path = tmp_path / "set.tar"
    whole = bytearray(
        write_tar(path, [("a.png", png()), ("a.txt", b"a"), ("b.png", png()), ("b.txt", b"b")]).read_bytes()
    )
    where %= 4096
    whole[where : where + len(put)] = put
    path.write_bytes(whole)
    with contextlib.suppress(ValueError):
        assert 1 <= len(from_tar(path, 4)) <= 2


@pytest.mark.parametrize("data", [b"", b"nonsense" * 200, b"\x1f\x8b nonsense", gzip.compress(b"nonsense" * 200)])
def test_no_tar(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.tar must be a \.tar or \.tar\.gz, but: "):
        from_tar(tmp_path / "a.tar", 4)


def test_nothing_to_use(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a\.tar must hold images .*key\.txt.*none were found. Left out: a.png: no cap"
    ):
        from_tar(write_tar(tmp_path / "a.tar", [("a.png", png())]), 4)
    with pytest.raises(ValueError, match="must be a file"):
        from_tar(tmp_path, 4)
