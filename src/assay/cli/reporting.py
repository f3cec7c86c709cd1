"""From records to a page, and to the claims on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from assay.cli.messages import errors, progress_bar, refusing, this_command

if TYPE_CHECKING:
    from assay.results.record import Record

_NEEDED = ("duckdb", "plotly", "matplotlib")
_COLOURS = {"holds": "green", "does not hold": "red", "holds only when …": "yellow", "not measured here": "dim"}


def can_report() -> str:
    """What is missing for a page, and how to get it; empty where nothing is."""
    missing = [package for package in _NEEDED if not _is_there(package)]
    return f"{', '.join(missing)} not installed; pip install 'assay[report]'" if missing else ""


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook that refuses it
        return False


def write(folder: Path, *, asked: str, command: str, quiet: bool = False) -> Path:
    """Read the folder's records and write its page, with a progress bar."""
    from assay.report.attribution import attribute
    from assay.report.build import write_report
    from assay.report.claims import judge, verdict
    from assay.results.reader import read_records

    reading = read_records(folder)
    for problem in reading.problems:
        errors.print(f"[yellow]{escape(problem)}[/]", soft_wrap=True)
    if not reading.rows:
        raise ValueError(f"There are no records in {folder}. Make some with: assay sweep precision --out {folder}")
    with progress_bar(quiet) as progress:
        task = progress.add_task("drawing", total=None)
        return write_report(
            reading.rows,
            judge(reading.rows),
            attribute(reading.rows),
            folder,
            asked=asked,
            verdict=verdict(reading.rows),
            problems=reading.problems,
            command=command,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep or a study.")],
) -> None:
    """Make the page, the Markdown and the figures from the records alone. Needs no torch."""
    with refusing("report", ValueError, OSError):
        missing = can_report()
        if missing:
            raise ValueError(missing)
        page = write(folder, asked="What do the records in this folder say?", command=this_command())
    typer.echo(f"Report: {page.resolve()}")


def print_claims(rows: Sequence[Record], as_json: bool) -> None:
    """The claims table and the verdict."""
    from assay.report.claims import judge, verdict

    claims = judge(rows)
    if as_json:
        typer.echo(json.dumps({"verdict": verdict(rows), "claims": [asdict(claim) for claim in claims]}))
        return
    console = Console()
    for claim in claims:
        console.print(
            f"[bold]{claim.number}[/] [{_COLOURS[claim.verdict]}]{claim.verdict}[/]: {escape(claim.text)} "
            f"[dim]Paper: {escape(claim.paper)}.[/]",
            soft_wrap=True,
        )
        for line in (*claim.ours, claim.because):
            console.print(Padding(escape(line), (0, 0, 0, 4)))
    console.print(f"\n[bold]{escape(verdict(rows))}[/]")
