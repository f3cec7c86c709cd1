"""Records without torch and without measuring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from assay.results.record import COLUMNS, POINTS, SCHEMA, Record
from assay.results.schema import Schema
from assay.results.training_record import TRAINING

_VALUES: dict[type, Any] = {str: "bf16", int: 3, float: 0.1, bool: True}


def make_record(**changes: Any) -> Record:
    """A valid record; some of the columns are always None, as most records have it."""
    record: Record = {name: _VALUES[kind] for name, kind in COLUMNS.items()}
    record |= dict.fromkeys(("triton", "role", "step", "path", "position", "block_shape"))
    record |= {"schema": SCHEMA, "id": "point", "time": "2026-11-15T06:00:00+00:00"}
    unknown = changes.keys() - COLUMNS.keys()
    assert not unknown, f"no columns: {unknown}"
    return record | changes


def make_records(count: int, prefix: str = "point") -> list[Record]:
    """Records that differ in id and time."""
    return [make_record(id=f"{prefix}-{i}", time=f"2026-11-15T06:00:00.{i:06d}+00:00") for i in range(count)]


def make_training(**changes: Any) -> Record:
    """A valid record of training: a pair's weights at a step."""
    record: Record = {name: _VALUES[kind] for name, kind in TRAINING.columns.items()}
    record |= {"triton": None, "kind": "weights", "layer": "", "loss": None, "scale": None}
    record |= {"schema": TRAINING.version, "id": "row", "time": "2026-11-15T06:00:00+00:00"}
    unknown = changes.keys() - TRAINING.columns.keys()
    assert not unknown, f"no columns: {unknown}"
    return record | changes


def write_lines(path: Path, records: Iterable[Record], schema: Schema = POINTS) -> Path:
    path.write_text("".join(schema.to_json(record) + "\n" for record in records), encoding="utf-8")
    return path


def equal(one: Record, other: Record) -> bool:
    """Equal columns, types and values, where NaN equals NaN and 0.0 is not −0.0."""
    return list(one) == list(other) and all(_equal(one[name], other[name]) for name in one)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)
