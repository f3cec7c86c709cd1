"""What a kind of record is: its columns, how a row becomes a line of JSON and comes back, and which files hold it.

A folder may hold several kinds. A column is a str, int, float or bool, or None where it does not apply. In JSON, NaN
and the infinities are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]
"""Column → value."""

_NEVER_EMPTY = ("schema", "id", "time")
_TYPES = {str, int, float, bool}
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """One kind of record: every one that is written has exactly these columns."""

    stem: str
    """What the names of its files begin with: `stem-….jsonl`, compacted to `stem.parquet`."""
    version: int
    """Raised when a column changes its meaning; records of another version are refused, not guessed at."""
    columns: Mapping[str, type] = field(hash=False)
    """Column → kind, the first three being schema, id and time."""
    others: tuple[str, ...] | None = None
    """For the one kind whose files may have any name: the stems of the other kinds."""
    added: tuple[str, ...] = ()
    """Columns that came later: a record written before has none, and is read with None there."""

    def __post_init__(self) -> None:
        if tuple(self.columns)[:3] != _NEVER_EMPTY or not set(self.columns.values()) <= _TYPES:
            raise ValueError(
                f"A schema must have columns of str, int, float or bool that begin with {', '.join(_NEVER_EMPTY)}, "
                f"got {dict(self.columns)}. Begin with PROVENANCE."
            )

    @property
    def compacted(self) -> str:
        """Name of the Parquet file that has all rows of a folder."""
        return f"{self.stem}.parquet"

    def owns(self, name: str) -> bool:
        """Whether a file of this name is for records of this kind."""
        if self.others is None:
            return _is_of(self.stem, name)
        return name.endswith((".jsonl", ".parquet")) and not any(_is_of(stem, name) for stem in self.others)

    def to_json(self, record: Mapping[str, Any]) -> str:
        """One line of JSON, checked against the schema."""
        self._check_columns(record)
        values = {name: self._checked(name, record[name]) for name in self.columns}
        line = json.dumps(values, ensure_ascii=False, allow_nan=False)
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a record must be text that UTF-8 can write, got {error.object[error.start]!r}") from None
        return line

    def from_json(self, line: str) -> Record:
        """The record of one line; a ValueError says what is wrong with it."""
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
        if not isinstance(values, dict) or "schema" not in values:
            raise ValueError("not a record of Assay: it has no schema")
        if values["schema"] != self.version:
            raise ValueError(f"a record of schema {values['schema']!r}; this version reads schema {self.version}")
        values = dict.fromkeys(self.added) | values
        self._check_columns(values)
        return {name: _decoded(kind, self._checked(name, values[name])) for name, kind in self.columns.items()}

    def id_of(self, line: bytes) -> str | None:
        """The id of a whole record of this kind; None for anything else. Quicker than `from_json`."""
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or values.get("schema") != self.version:
            return None
        identity = values["id"] if values.keys() | set(self.added) == self.columns.keys() else None
        return identity if isinstance(identity, str) else None

    def _check_columns(self, record: Mapping[str, Any]) -> None:
        unknown = [name for name in record if name not in self.columns]
        missing = [name for name in self.columns if name not in record]
        if unknown or missing:
            raise ValueError(
                f"a record in {self.stem}-*.jsonl must have the columns of its schema; "
                f"unknown: {unknown}, missing: {missing}"
            )

    def _checked(self, name: str, value: Any) -> Any:
        """The value as JSON has it; a ValueError if it is not of the column's kind."""
        kind = self.columns[name]
        if name == "schema" and value != self.version:
            raise ValueError(f"column schema must be {self.version}, got {value!r}")
        if value is None and name not in _NEVER_EMPTY:
            return None
        if kind is float and type(value) in (int, float):
            return _as_float(name, value)
        if kind is float and type(value) is str and value in _NOT_FINITE:
            return value
        if type(value) is not kind:
            raise ValueError(f"column {name} must be {kind.__name__}, got {value!r}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"column {name} must fit into 64 bits, got {value}")
        return value


def _is_of(stem: str, name: str) -> bool:
    return name == f"{stem}.parquet" or (name.startswith(f"{stem}-") and name.endswith(".jsonl"))


def _as_float(name: str, value: int | float) -> float | str:
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"column {name} must be a float, got a whole number beyond its range") from None
    return number if math.isfinite(number) else str(number)


def _decoded(kind: type, value: Any) -> Any:
    return float(value) if kind is float and value is not None else value
