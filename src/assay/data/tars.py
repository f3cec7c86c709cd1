"""A WebDataset tar: key.jpg with key.txt or key.json. It is read where it is; nothing is extracted."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from assay.data import captions
from assay.data.captioned import Captioned
from assay.data.decoding import SUFFIXES
from assay.data.gathering import Gathering, own
from assay.data.reading import LARGEST_CAPTION, LARGEST_IMAGE, UnreadableError, check_bytes, printable

_LOOKED_FOR = f"images ({', '.join(SUFFIXES)}) with captions: key.png with key.txt, or key.json that has caption"
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, OverflowError, RecursionError)


def from_tar(path: str | os.PathLike[str], size: int) -> Captioned:
    """The images in a .tar or .tar.gz, in its order. A tar that breaks off gives what comes before."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"A tar must be a file, but {printable(str(path))} is none. Give its path.")
    gathering = Gathering(size)
    texts: dict[str, str] = {}
    objects: dict[str, str] = {}
    for key, name, data in _members(path, gathering):
        suffix = PurePosixPath(name).suffix.lower()
        if suffix in SUFFIXES:
            gathering.add(key, name, data)
        else:
            caption = captions.from_text(data) if suffix == ".txt" else captions.from_json(data)
            if caption:
                (texts if suffix == ".txt" else objects).setdefault(key, caption)
    return gathering.finish(path.name, {**objects, **texts}, own(path.name), _LOOKED_FOR)


class _Careful(io.BufferedReader):
    """A header in a compressed tar may claim to be of any length; nothing we want is that long."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LARGEST_IMAGE:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def _open(path: Path) -> _Careful:
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    raw = gzip.GzipFile(path) if compressed else open(path, "rb", buffering=0)  # noqa: SIM115
    return _Careful(cast(io.RawIOBase, raw))


def _members(path: Path, gathering: Gathering) -> Iterator[tuple[str, str, bytes]]:
    """(key, name, bytes) of each image and caption. Names are only names here: no path is ever made of one."""
    with _open(path) as file:
        try:
            tar = tarfile.open(fileobj=cast(IO[bytes], file), mode="r:")  # noqa: SIM115
        except _BROKEN as error:
            raise ValueError(f"{printable(path.name)} must be a .tar or .tar.gz, but: {error}.") from error
        with tar:
            while True:
                try:
                    member = _next(tar, file)
                    taken = None if member is None else _take(tar, member, gathering)
                except _BROKEN as error:
                    gathering.skip(f"{path.name} from byte {tar.offset}", f"broken, not read further ({error})")
                    return
                if member is None:
                    return
                if taken is not None:
                    yield taken


def _next(tar: tarfile.TarFile, file: _Careful) -> tarfile.TarInfo | None:
    """The next member. tarfile takes a broken header for the end, and goes back where a size is negative."""
    member = tar.next()
    cast(Any, tar).members.clear()  # else it keeps them all
    if member is None:
        file.seek(tar.offset)
        if any(file.read(tarfile.BLOCKSIZE)):
            raise tarfile.ReadError("a header that is none")
    elif member.size < 0 or tar.offset <= member.offset:
        raise tarfile.ReadError("a negative size")
    return member


def _take(tar: tarfile.TarFile, member: tarfile.TarInfo, gathering: Gathering) -> tuple[str, str, bytes] | None:
    name = PurePosixPath(member.name)
    suffix = name.suffix.lower()
    if suffix not in (*SUFFIXES, ".txt", ".json") or name.name.startswith("."):
        return None
    try:
        if not member.isreg():
            raise UnreadableError("a link or a device, not a file")
        check_bytes(member.size, LARGEST_IMAGE if suffix in SUFFIXES else LARGEST_CAPTION)
    except UnreadableError as error:
        gathering.skip(member.name, str(error))
        return None
    file = tar.extractfile(member)
    data = file.read() if file else b""
    return str(name.with_name(name.name.split(".", 1)[0])), member.name, data
