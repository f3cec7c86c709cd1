"""`assay compact`: the records of a run as one Parquet file a kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def compact(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print path, rows and problems as JSON.")] = False,
) -> None:
    """Write all records of a run, typed, to DIR/records.parquet, for DuckDB, pandas, polars and others.

    Those of training go to DIR/training.parquet. The JSON lines stay where they are, so a run can go on. Compact
    again to renew the file.
    """
    from assay.results.reader import compact_all

    try:
        done = compact_all(folder)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        # Not through rich, which takes [brackets] in a file's name for styles.
        typer.secho(f"assay compact: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    if as_json:
        printed = [{"path": str(each.path), "rows": each.rows, "problems": each.problems} for each in done]
        typer.echo(json.dumps(printed if len(printed) > 1 else printed[0]))
        return
    for each in done:
        typer.echo(f"{each.path}: {each.rows} records")
        for problem in each.problems:
            typer.secho(f"Left out: {problem}", fg="yellow", err=True)
