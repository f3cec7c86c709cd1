"""Judge a file of lines one by one, in Python: slower than DuckDB, but it can say what is wrong and where.

`Schema.from_json` has the last word on what a record is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from assay.results.record import POINTS
from assay.results.schema import Schema

_LONGEST = 1 << 20
"""Bytes of a line that may still be a record, which has some 4000. Garbage need not have line ends at all."""


class Sifted(NamedTuple):
    """What a file of lines holds."""

    lines: int
    kept: int
    faults: list[tuple[int, str]]
    """Line number from 1, and what is wrong with it."""


def sift(path: Path, target: Path, schema: Schema = POINTS) -> Sifted:
    """Write the records in `path` to `target`, each as `to_json` writes it; say what is wrong with the other lines."""
    lines = kept = 0
    faults: list[tuple[int, str]] = []
    with path.open("rb") as source, target.open("wb") as good:
        for number, line in enumerate(_lines(source), 1):
            if line == b"":
                continue
            lines += 1
            try:
                good.write(_canonical(line, schema))
                kept += 1
            except ValueError as error:
                faults.append((number, str(error)))
    return Sifted(lines, kept, faults)


def cut_short(path: Path, schema: Schema = POINTS) -> bool:
    """Does the file end within a row of ours? A process that is killed while it writes leaves that."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LONGEST))
        last = file.read().rpartition(b"\n")[2]
    beginning = b'{"schema": '
    if not last or last[: len(beginning)] != beginning[: len(last)]:
        return False
    try:
        _canonical(last, schema)
    except ValueError:
        return True
    return False  # only the line's end is missing


def _canonical(line: bytes, schema: Schema) -> bytes:
    if len(line) > _LONGEST:
        raise ValueError(f"longer than the {_LONGEST} bytes that a record may have")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not text in UTF-8 ({error.reason} at byte {error.start})") from None
    return schema.to_json(schema.from_json(text)).encode() + b"\n"


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines without their ends and surrounding blanks; of an overlong one only the beginning."""
    while line := file.readline(_LONGEST + 1):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(_LONGEST)
        yield line.strip()
