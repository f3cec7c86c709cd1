"""Reading files that somebody else made: never too much at once, never a pipe, and names that can be printed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LARGEST_IMAGE = 64 * 2**20
"""Bytes of an encoded image."""
LARGEST_CAPTION = 2**20
"""Bytes of a file with a caption."""


class UnreadableError(ValueError):
    """Why one file cannot be used; the others can."""


def read(path: Path, most: int) -> bytes:
    """The bytes of an ordinary file, or of what a link to one leads to."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError("not a file")
        check_bytes(found.st_size, most)
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    check_bytes(len(data), most)
    return data


def check_bytes(size: int, most: int) -> None:
    """Refuse more than `most`."""
    if size > most:
        raise UnreadableError(f"more than {most // 2**20} MiB")


def printable(name: str) -> str:
    """A name without what would move a terminal's cursor or cannot be written as UTF-8."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)
