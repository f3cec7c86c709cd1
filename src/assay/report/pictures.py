"""Pictures that a trained model painted, from the folder `samples` beside the records."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "samples"
LISTED = "samples.json"
_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST = 4 * 2**20


class Picture(NamedTuple):
    """A PNG with its words."""

    file: str
    """Its name in the folder `samples`."""
    png: bytes
    title: str
    captions: tuple[str, ...]
    attribution: str
    """Whose data the model learnt from."""

    @property
    def described(self) -> str:
        """For those who cannot see it."""
        return f"{self.title}: {'; '.join(self.captions)}" if self.captions else self.title

    @property
    def address(self) -> str:
        """The picture itself as a data: URI."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def read_pictures(folder: Path) -> tuple[list[Picture], list[str]]:
    """The pictures that samples/samples.json names, and what is wrong with those that are left out."""
    place = folder / FOLDER / LISTED
    try:
        listed = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError, RecursionError) as error:
        return [], [f"{FOLDER}/{LISTED} cannot be read, so no samples are shown: {error}."]
    if not isinstance(listed, list):
        return [], [f"{FOLDER}/{LISTED} must be a list, so no samples are shown."]
    found: list[Picture] = []
    problems: list[str] = []
    for each in listed:
        try:
            found.append(_picture(folder / FOLDER, each))
        except (OSError, ValueError) as error:
            problems.append(f"A sample was left out: {error}.")
    return found, problems


def _picture(folder: Path, told: Any) -> Picture:
    if not isinstance(told, dict) or not isinstance(told.get("file"), str):
        raise ValueError(f"an entry of {LISTED} must have a file, got {str(told)[:80]!r}")
    name = told["file"]
    if Path(name).name != name or "\\" in name or not name.lower().endswith(".png"):
        raise ValueError(f"a file must be the name of a PNG in {FOLDER}, got {name[:80]!r}")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{name!r} is not there")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{name!r} is larger than {_LARGEST // 2**20} MiB")
    png = path.read_bytes()
    if not _is_whole(png):
        raise ValueError(f"{name!r} is not a whole PNG")
    captions = told.get("captions") or ()
    captions = (captions,) if isinstance(captions, str) else captions
    if not isinstance(captions, (list, tuple)):
        raise ValueError(f"captions must be a list, got {str(captions)[:80]!r}")
    return Picture(
        name, png, str(told.get("title") or name), tuple(map(str, captions)), str(told.get("attribution") or "")
    )


def _is_whole(png: bytes) -> bool:
    """Whether all its chunks are there, as they were written."""
    chunks = list(_chunks(png))
    kinds = [kind for kind, _ in chunks]
    sound = png.startswith(_PNG) and all(sound for _, sound in chunks)
    return sound and kinds[:1] == [b"IHDR"] and b"IDAT" in kinds and kinds[-1:] == [b"IEND"]


def _chunks(png: bytes) -> Iterator[tuple[bytes, bool]]:
    place = len(_PNG)
    while place + 12 <= len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        end = place + 8 + length
        yield kind, end + 4 <= len(png) and png[end : end + 4] == zlib.crc32(png[place + 4 : end]).to_bytes(4, "big")
        place = end + 4
