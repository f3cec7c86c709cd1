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

from assay.cli.messages import errors, progress_bar, refusing
from assay.results.record import MEASURED

if TYPE_CHECKING:
    from assay.results.reader import Reading
    from assay.results.record import Record

_ASKED = "study.json"
_FIGURES = (
    "seed",
    "length",
    "heads",
    "dim",
    "null_max",
    *(name for name in MEASURED if not name.endswith("_nonfinite")),
)
"""What a record must have for the page: the schema allows that columns are empty."""
_NEEDED = ("duckdb", "plotly", "matplotlib")
_COLOURS = {
    "holds": "green",
    "does not hold": "red",
    "holds only when …": "yellow",
    "not measured here": "dim",
    "undecided": "yellow",
}


def can_report() -> str:
    """What is missing for a page, and how to get it; empty where nothing is."""
    missing = [package for package in _NEEDED if not _is_there(package)]
    return f"{', '.join(missing)} not installed; pip install 'assay[report]'" if missing else ""


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook that refuses it
        return False


def remember(folder: Path, *, asked: str, command: str) -> None:
    """Keep what was asked beside the records, so that the page says it whenever it is made."""
    from assay.report.files import write_whole

    write_whole(folder / _ASKED, json.dumps({"asked": asked, "command": command}, ensure_ascii=False).encode())


def _remembered(folder: Path) -> tuple[str, str]:
    try:
        found = json.loads((folder / _ASKED).read_text(encoding="utf-8"))
        return str(found["asked"]), str(found["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return "What do the records in this folder say?", ""


def write(folder: Path) -> tuple[Reading, Path]:
    """Read the folder's records and write its page, with a progress bar."""
    from assay.report.attribution import attribute
    from assay.report.build import write_report
    from assay.report.claims import judge, verdict
    from assay.results.reader import Reading, read_records

    reading = read_records(folder)
    rows = [row for row in reading.rows if all(row[name] is not None for name in _FIGURES)]
    problems = list(reading.problems)
    if len(rows) < len(reading.rows):
        problems.append(f"{len(reading.rows) - len(rows)} records lack some of their figures and were left out.")
    for problem in problems:
        errors.print(f"[yellow]{escape(problem)}[/]", soft_wrap=True)
    if not rows:
        raise ValueError(f"There are no records in {folder}. Make some with: assay sweep precision --out {folder}")
    asked, command = _remembered(folder)
    with progress_bar() as progress:
        task = progress.add_task("drawing", total=None)
        page = write_report(
            rows,
            judge(rows),
            attribute(rows),
            folder,
            asked=asked,
            verdict=verdict(rows),
            problems=problems,
            command=command,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    return Reading(rows, problems), page


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep or a study.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's path and the problems as JSON.")] = False,
) -> None:
    """Make the page, the Markdown and the figures from the records alone. Needs no torch."""
    with refusing("report", ValueError, OSError):
        missing = can_report()
        if missing:
            raise ValueError(missing)
        reading, page = write(folder)
    if as_json:
        found = {"report": str(page.resolve()), "records": len(reading.rows), "problems": reading.problems}
        typer.echo(json.dumps(found))
    else:
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
