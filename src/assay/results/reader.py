"""Records back from the folder of a run, and the same records as one Parquet file for other tools."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from assay.results.gather import FIRST, Gathered, gather
from assay.results.kinds import kinds_in
from assay.results.record import POINTS
from assay.results.schema import Record, Schema


class Reading(NamedTuple):
    """What a folder holds."""

    rows: list[Record]
    """Every record once, by time."""
    problems: list[str]
    """What could not be read: file, how much of it, why. The rest was read."""


class Compacted(NamedTuple):
    """What `compact` wrote."""

    path: Path
    rows: int
    problems: list[str]


def read_records(folder: Path, columns: Sequence[str] | None = None, schema: Schema = POINTS) -> Reading:
    """All records of one kind in a folder; with `columns` only those, which saves time and memory.

    A ValueError says why a folder cannot be read; what is wrong inside it is a problem, and the rest is read.
    """
    names = list(schema.columns if columns is None else dict.fromkeys(columns))
    unknown = [name for name in names if name not in schema.columns]
    if unknown or not names:
        raise ValueError(f"Columns must be some of the schema's, got {unknown or 'none'}. See its `columns`.")
    rows: list[Record] = []
    with gather(folder, schema) as found, _without_collector():
        cursor = found.connection.execute(f"SELECT {_list(names)} {FIRST}")
        empty: Record = dict.fromkeys(names)
        while chunk := cursor.fetchmany(10_000):
            for values in chunk:
                row = empty.copy()  # twice as fast as a new dict, which grows step by step
                row.update(zip(names, values, strict=True))
                rows.append(row)
        return Reading(rows, found.problems)


def compact(folder: Path, schema: Schema = POINTS) -> Compacted:
    """Write all records of one kind in the folder, typed, to its `records.parquet` or alike; again to renew it.

    The JSON lines stay: another process may be writing them, and a machine that measures needs no DuckDB to know what
    is done. A reader takes a record that is in both once.
    """
    return _some(folder, [_compact(folder, schema)])[0]


def compact_all(folder: Path) -> list[Compacted]:
    """`compact` every kind of record that the folder has."""
    return _some(folder, [_compact(folder, schema) for schema in kinds_in(folder)])


def _some(folder: Path, tried: list[Compacted]) -> list[Compacted]:
    """Those with records; the problems of the others go to the first of them."""
    done = [each for each in tried if each.rows]
    problems = [problem for each in tried if not each.rows for problem in each.problems]
    if not done:
        raise ValueError(
            f"A folder to compact must hold records, but {folder} has none. Give the folder that a sweep wrote "
            f"into.{''.join(f' {problem}' for problem in problems)}"
        )
    return [done[0]._replace(problems=sorted(done[0].problems + problems)), *done[1:]]


def _compact(folder: Path, schema: Schema) -> Compacted:
    """Writes nothing where there are no records."""
    target = folder / schema.compacted
    with gather(folder, schema) as found:
        if target.absolute() in found.strangers:
            raise ValueError(
                f"{target} must be a file that `compact` wrote, or not be there, but "
                f"{'; '.join(found.problems)} Move it away, then compact again."
            )
        count = int(found.connection.execute("SELECT count(DISTINCT id) FROM found").fetchall()[0][0])
        if count:
            _write(found, target)
        return Compacted(target, count, found.problems)


def _write(found: Gathered, target: Path) -> None:
    scratch = target.parent / f".compact-{os.getpid()}-{secrets.token_hex(2)}.tmp"  # a reader does not look at it
    try:
        found.connection.execute("SET preserve_insertion_order = true")  # by time
        found.connection.sql(f"SELECT {_list(list(found.schema.columns))} {FIRST}").write_parquet(
            str(scratch), compression="zstd"
        )
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, target)  # readers see the old file or the new one, never half of it
    except Exception as error:
        raise ValueError(f"{target} must be writable, but: {error}. Make room, or change the permissions.") from error
    finally:
        scratch.unlink(missing_ok=True)


def _list(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Python's cycle collector walks all rows again and again while they grow: half of the time, for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
