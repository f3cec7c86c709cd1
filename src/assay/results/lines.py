"""Records straight from a folder's JSON lines, with nothing but Python: for tables where DuckDB is not installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from assay.results.record import POINTS
from assay.results.schema import Record, Schema


def records_of(folder: Path, ids: Iterable[str], schema: Schema = POINTS) -> list[Record]:
    """The records with these ids, in this order; what the folder lacks is left out."""
    wanted = list(ids)
    found = {record["id"]: record for record in _whole_records(folder, schema)}
    return [found[key] for key in wanted if key in found]


def all_records(folder: Path, schema: Schema = POINTS) -> list[Record]:
    """Every record of this kind in the folder, once."""
    return list({record["id"]: record for record in _whole_records(folder, schema)}.values())


def _whole_records(folder: Path, schema: Schema) -> Iterator[Record]:
    for path in sorted(path for path in folder.glob("*.jsonl") if schema.owns(path.name)):
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield schema.from_json(line)
                except ValueError:
                    continue  # cut short or not ours: `reader` says so
