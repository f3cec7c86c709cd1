"""All records of one kind in a folder, in one DuckDB table, and what could not be read.

DuckDB takes the lines that look exactly as `to_json` writes them, which one regular expression checks: keys and their
order, types, "nan". A file with any other line goes through `sift`, which says what is wrong and keeps what is right.
Data is never part of a statement: paths are parameters, and nothing in a file is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from assay.results.kinds import kind_with
from assay.results.record import POINTS
from assay.results.schema import Schema
from assay.results.sift import Sifted, cut_short, sift

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TYPES = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}

_JSON = {
    str: r'"(?:[^"\\]|\\.)*"',
    int: r"-?[0-9]{1,19}",
    float: r'-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|"nan"|"-?inf"',
    bool: "true|false",
}


class Gathered(NamedTuple):
    """A folder's records in the table `found`, which has their columns and the `file`; `FIRST` picks each id once."""

    schema: Schema
    connection: DuckDBPyConnection
    problems: list[str]
    strangers: list[Path]
    """Files that are not ours at all or cannot be read."""


FIRST = "FROM found WHERE rowid IN (SELECT arg_min(rowid, (time, file)) FROM found GROUP BY id) ORDER BY time, id"
"""Every record once, the first by time where an id was measured twice or is in a compacted file too."""


@contextlib.contextmanager
def gather(folder: Path, schema: Schema = POINTS) -> Iterator[Gathered]:
    """Read all files of the kind in the folder; a ValueError says why there is none."""
    if not folder.is_dir():
        raise ValueError(
            f"Records are read from the folder of a run, but {folder} "
            f"{'is a file' if folder.exists() else 'does not exist'}. Give the folder that a sweep wrote into."
        )
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Reading records needs DuckDB: pip install 'assay[report]'", name=error.name
        ) from None

    # Without a place of its own, DuckDB spills into `.tmp` in the current folder.
    with tempfile.TemporaryDirectory(prefix="assay-") as scratch:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "temp_directory": scratch,
            "autoinstall_known_extensions": False,
            "preserve_insertion_order": False,
        }
        with duckdb.connect(config=settings) as connection:
            columns = ", ".join(f'"{name}" {kind}' for name, kind in _types(schema).items())
            connection.execute(f"CREATE TABLE found (file VARCHAR, {columns})")
            gathered = Gathered(schema, connection, [], [])
            files = sorted(path for path in folder.absolute().iterdir() if schema.owns(path.name) and path.is_file())
            _add_lines(gathered, [path for path in files if path.name.endswith(".jsonl")], Path(scratch))
            for path in files:
                if path.name.endswith(".parquet"):
                    _add_parquet(gathered, path)
            gathered.problems.sort()
            yield gathered


def _add_lines(gathered: Gathered, paths: list[Path], scratch: Path) -> None:
    schema, connection, problems, strangers = gathered
    for path, refused in _insert_lines(schema, connection, paths).items():
        target = scratch / "sifted.jsonl"
        try:
            if refused == 1 and cut_short(path, schema):
                problems.append(_about(path, f"its last line has no end and was left out: {_CUT}"))
                continue
            sifted = sift(path, target, schema)
        except OSError as error:
            strangers.append(path)
            problems.append(_about(path, f"cannot be read and was left out: {error.strerror or error}."))
            continue
        if sifted.faults:
            problems.append(_about(path, _describe(sifted, cut_short(path, schema))))
        if sifted.kept == 0:
            strangers.append(path)
        # What DuckDB took of the file at first comes again; a record is read once.
        if _insert_lines(schema, connection, [target]):
            problems.append(_about(path, f"DuckDB could not take all of its {sifted.kept} records."))


_CUT = "the process was stopped while it wrote the row, or is still writing it. The row is measured again on resuming."


def _describe(sifted: Sifted, cut: bool) -> str:
    """How many lines are not records, and the first of each kind."""
    reasons: dict[str, int] = {}
    for number, reason in sifted.faults:
        reasons.setdefault(reason if len(reason) <= 200 else reason[:200] + "…", number)
    shown = [f"line {number}: {reason}" for reason, number in list(reasons.items())[:3]]
    if len(reasons) > 3:
        shown.append("and others")
    end = f" Its last line has no end: {_CUT}" if cut else ""
    return (
        f"{len(sifted.faults)} of its {sifted.lines} lines are not records and were left out ({'; '.join(shown)}).{end}"
    )


def _insert_lines(schema: Schema, connection: DuckDBPyConnection, paths: list[Path]) -> dict[Path, int]:
    """Add the files' records; the files with lines that were refused: how many, -1 where DuckDB refuses the file."""
    import duckdb

    if not paths:
        return {}
    structure = "'" + json.dumps(_types(schema)) + "'"
    try:
        # A strict transformation fails as a whole where a number does not fit: that is for `sift` to find.
        connection.execute(
            f"""
            INSERT INTO found SELECT filename, record.* FROM (
                SELECT filename, CASE
                    WHEN regexp_full_match(json::VARCHAR, $line) THEN json_transform_strict(json, {structure})
                END AS record
                FROM read_ndjson_objects(
                    $paths, ignore_errors = true,
                    filename = true, compression = 'uncompressed', hive_partitioning = false
                )
            )
            """,
            {"line": _line_pattern(schema), "paths": [_literal(path) for path in paths]},
        )
    except (duckdb.Error, UnicodeEncodeError):
        if len(paths) == 1:
            return {paths[0]: -1}
        half = len(paths) // 2  # one statement for each file would be slow with hundreds of them
        return _insert_lines(schema, connection, paths[:half]) | _insert_lines(schema, connection, paths[half:])
    refused = connection.execute("SELECT file, count(*) FROM found WHERE id IS NULL GROUP BY file").fetchall()
    connection.execute("DELETE FROM found WHERE id IS NULL")
    return {Path(file): int(count) for file, count in refused}


def _add_parquet(gathered: Gathered, path: Path) -> None:
    import duckdb

    schema, connection, problems, strangers = gathered
    source = "FROM read_parquet($path, hive_partitioning = false)"
    whole = f"schema IS NOT DISTINCT FROM {schema.version} AND id IS NOT NULL AND time IS NOT NULL"
    where = {"path": _literal(path)}
    try:
        described = f"SELECT column_name, column_type FROM (DESCRIBE SELECT * {source})"
        columns = dict(connection.execute(described, where).fetchall())
        missing = schema.columns.keys() - columns.keys()
        if columns | {name: _types(schema)[name] for name in missing & set(schema.added)} != _types(schema):
            strangers.append(path)
            problems.append(_about(path, _other_columns(schema, columns)))
            return
        names = ", ".join("NULL" if name in missing else f'"{name}"' for name in schema.columns)
        connection.execute(f"INSERT INTO found SELECT $path, {names} {source} WHERE {whole}", where)
        others = connection.execute(f"SELECT count(*) {source} WHERE NOT ({whole})", where).fetchall()[0][0]
        if others:
            what = f"{others} of its rows are of another schema or have no id, and were left out."
            problems.append(_about(path, what))
    except (duckdb.Error, UnicodeEncodeError) as error:
        strangers.append(path)
        first = (str(error).splitlines() or [""])[0]
        problems.append(_about(path, f"not a Parquet file that can be read, and was left out ({first[:200]})."))


def _other_columns(schema: Schema, columns: Collection[str]) -> str:
    other = kind_with(columns)
    if other is None or other == schema:
        return f"its columns are not those of schema {schema.version}, which this version reads; it was left out."
    return f"its rows are of another kind, which belongs into {other.compacted}; it was left out."


def _about(path: Path, what: str) -> str:
    name = path.name.encode("utf-8", "backslashreplace").decode()  # not every name can be printed
    return f"{name}: {what}"


def _line_pattern(schema: Schema) -> str:
    parts = []
    for name, kind in schema.columns.items():
        token = str(schema.version) if name == "schema" else _JSON[kind]
        null = "" if name in ("schema", "id", "time") else "|null"
        parts.append(f'"{name}": (?:{token}{null})')
    return r"\{" + ", ".join(parts) + r"\}"


def _types(schema: Schema) -> dict[str, str]:
    return {name: TYPES[kind] for name, kind in schema.columns.items()}


def _literal(path: Path) -> str:
    """The path as a pattern that matches only itself: DuckDB takes [ * and ? in paths for patterns.

    A backslash beside them cannot be written in all versions of DuckDB; `sift` then reads the lines.
    """
    text = os.path.abspath(path)
    text.encode()  # a name that is no text is an error here, of one kind with all versions of DuckDB
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)
