"""From records to a page, and to the claims on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from assay.cli.messages import errors, progress_bar, refusing, this_command
from assay.results.record import MEASURED

if TYPE_CHECKING:
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
_PLACE = ("arm", "seed", "step", "kind", "layer", "recipe", "model", "steps", "device")
_COMPARED = ("count", "max", "rmse", "w1", "std", "relative_w1", "relative_rmse")
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
    from assay._files import write_whole

    write_whole(folder / _ASKED, json.dumps({"asked": asked, "command": command}, ensure_ascii=False).encode())


def _remembered(folder: Path) -> tuple[str, str]:
    try:
        found = json.loads((folder / _ASKED).read_text(encoding="utf-8"))
        return str(found["asked"]), str(found["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return "What do the records in this folder say?", ""


class Written(NamedTuple):
    """A report, and the records that it is made of."""

    page: Path
    rows: list[Record]
    training: list[Record]
    watched: list[Record]
    problems: list[str]


def write(folder: Path) -> Written:
    """Read the folder's records and write its page, with a progress bar."""
    from assay.report.attribution import attribute
    from assay.report.build import write_report
    from assay.report.claims import judge, verdict
    from assay.report.pictures import read_pictures
    from assay.report.watch_section import findings
    from assay.results.reader import read_records
    from assay.results.record import POINTS
    from assay.results.training_record import TRAINING
    from assay.results.watch_record import WATCH

    points, trained, watched = (read_records(folder, schema=kind) for kind in (POINTS, TRAINING, WATCH))
    rows, training = list(filter(_has_figures, points.rows)), list(filter(_has_training, trained.rows))
    pictures, missing = read_pictures(folder)
    problems = [*points.problems, *trained.problems, *watched.problems, *missing]
    lacking = len(points.rows) + len(trained.rows) - len(rows) - len(training)
    if lacking:
        problems.append(f"{lacking} records lack some of their figures and were left out.")
    for problem in problems:
        errors.print(f"[yellow]{escape(problem)}[/]", soft_wrap=True)
    if not rows and not training and not watched.rows:
        raise ValueError(f"There are no records in {folder}. Make some with: assay sweep precision --out {folder}")
    asked, command = _remembered(folder)
    with progress_bar() as progress:
        task = progress.add_task("drawing", total=None)
        page = write_report(
            rows,
            judge(rows, training) if rows or training else [],
            attribute(rows),
            folder,
            asked=asked,
            verdict=verdict(rows, training) if rows or training else " ".join(findings(watched.rows)),
            problems=problems,
            command=command,
            training=training,
            watched=watched.rows,
            pictures=pictures,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    return Written(page, rows, training, watched.rows, problems)


def _has_figures(row: Record) -> bool:
    return all(row[name] is not None for name in _FIGURES)


def _has_training(row: Record) -> bool:
    """A row about a pair needs what was compared, one about a run nothing but its place."""
    needed = _PLACE if row["pair"] is None else (*_PLACE, *_COMPARED)
    return all(row[name] is not None for name in needed) and (row["pair"] is not None or row["kind"] == "run")


def conclude(command: str, folder: Path, *, asked: str, as_json: bool, claims: bool) -> None:
    """What a study or a pair ends with: its page, or how to get one; and before it the claims."""
    from assay.results.lines import all_records
    from assay.results.training_record import TRAINING

    missing = can_report()
    with refusing(command, ValueError, OSError):
        remember(folder, asked=asked, command=this_command())
        written = None if missing else write(folder)
        if claims and written is None:
            print_claims(all_records(folder), all_records(folder, TRAINING), as_json)
        elif claims and written is not None:
            print_claims(written.rows, written.training, as_json)
    if written is None:
        words = f"No page: {missing}. Elsewhere, `assay report {folder}` makes it from the records."
        errors.print(words, soft_wrap=True, markup=False)
    elif not as_json:
        typer.echo(f"Report: {written.page.resolve()}")


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep, a study or a pair.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's path and the problems as JSON.")] = False,
) -> None:
    """Make the page, the Markdown and the figures from the records alone. Needs no torch."""
    with refusing("report", ValueError, OSError):
        missing = can_report()
        if missing:
            raise ValueError(missing)
        written = write(folder)
    if as_json:
        records = len(written.rows) + len(written.training) + len(written.watched)
        found = {"report": str(written.page.resolve()), "records": records, "problems": written.problems}
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"Report: {written.page.resolve()}")


def print_claims(rows: Sequence[Record], training: Sequence[Record], as_json: bool) -> None:
    """The claims table and the verdict."""
    from assay.report.claims import judge, verdict

    claims, said = judge(rows, training), verdict(rows, training)
    if as_json:
        typer.echo(json.dumps({"verdict": said, "claims": [asdict(claim) for claim in claims]}))
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
    console.print(f"\n[bold]{escape(said)}[/]")
