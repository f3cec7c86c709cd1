"""Captions as people keep them: a text file, a JSON object, a table."""

from __future__ import annotations

import csv
import io
import json
import posixpath
import unicodedata
from collections.abc import Iterator
from typing import Any

CAPTION_KEYS = ("caption", "captions", "text")
_FILE_KEYS = ("file_name", "file", "image")


def clean(caption: object) -> str | None:
    """One line without control characters; None where nothing is left. Of several captions the first."""
    if isinstance(caption, list | tuple):
        caption = next((one for one in caption if isinstance(one, str)), None)
    if not isinstance(caption, str):
        return None
    kept = "".join(c for c in caption if c.isspace() or unicodedata.category(c) not in ("Cc", "Cs"))
    return " ".join(kept.split()) or None


def from_text(data: bytes) -> str | None:
    """The caption that is a whole file."""
    try:
        return clean(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return None


def from_object(values: object) -> str | None:
    """The caption in a JSON object or a row, under the first of its names that has one."""
    if not isinstance(values, dict):
        return None
    return next((found for key in CAPTION_KEYS if (found := clean(values.get(key)))), None)


def from_json(data: bytes) -> str | None:
    """The caption in a JSON file."""
    try:
        return from_object(json.loads(data))
    except (ValueError, RecursionError):
        return None


def from_table(data: bytes, kind: str) -> Iterator[tuple[str, str | None, str | None]]:
    """(where, image's name, caption) of each row of a table, .csv or .jsonl; None for what a row lacks."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"A table of captions must be UTF-8, but: {error}. Save it as UTF-8.") from error
    rows = _csv_rows(text) if kind == ".csv" else _json_rows(text)
    for where, values in rows:
        named = values.get(next((key for key in _FILE_KEYS if key in values), ""))
        path = posixpath.normpath(named.replace("\\", "/")) if isinstance(named, str) and named else None
        yield where, path, from_object(values)


def _csv_rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    table = csv.DictReader(io.StringIO(text, newline=""))
    header = table.fieldnames or []
    if not set(header) & set(_FILE_KEYS) or not set(header) & set(CAPTION_KEYS):
        raise ValueError(
            f"A table of captions must begin with the names of its columns, {' or '.join(_FILE_KEYS)} and "
            f"{' or '.join(CAPTION_KEYS)}, got {header}."
        )
    try:
        for values in table:
            yield f"line {table.line_num}", values
    except csv.Error as error:
        raise ValueError(f"A table of captions must be plain CSV, but line {table.line_num}: {error}.") from error


def _json_rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            yield f"line {number}", values if isinstance(values, dict) else {}
