"""Running sweeps from a command: progress, Ctrl-C, checks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.progress import Progress, TaskID

from assay.cli.messages import errors, progress_bar, refusing, this_command

if TYPE_CHECKING:
    from assay.results.record import Record
    from assay.sweeps.grid import Sweep


def run_sweeps(
    command: str, sweeps: Sequence[Sweep], folder: Path, device: str, jobs: int | None, quiet: bool
) -> list[list[Record]]:
    """The records of each sweep, measured now or before. Ctrl-C says how to go on, and exits with 130."""
    from assay.executors.local import cores
    from assay.results.lines import records_of
    from assay.results.store import StoreError
    from assay.sweeps.run import run_points

    with refusing(command, ValueError):
        grids = [sweep.points(device) for sweep in sweeps]
    if jobs is None:
        jobs = cores() if device == "cpu" else 1
    found: list[list[Record]] = []
    total = sum(map(len, grids))
    before = 0
    with progress_bar(quiet) as progress:
        task = progress.add_task("measuring", total=total)
        try:
            for sweep, points in zip(sweeps, grids, strict=True):
                progress.update(task, description=f"measuring {sweep.name}")
                show = partial(_show, progress, task, before)
                with refusing(command, ValueError, StoreError):
                    ids = run_points(points, folder, device, jobs, show)
                found.append(records_of(folder, ids))
                before += len(points)
        except KeyboardInterrupt:
            progress.stop()
            there = int(progress.tasks[0].completed)
            errors.print(
                f"Stopped with {there} of {total} points in {folder}. Go on with: {this_command()}", soft_wrap=True
            )
            raise typer.Exit(130) from None
    return found


def _show(progress: Progress, task: TaskID, before: int, here: int) -> None:
    progress.update(task, completed=before + here)


def check(command: str, found: Sequence[Sequence[Record]]) -> None:
    """The null of every sweep must be 0: exit 1 if the emulation differs from itself."""
    differing = [r for rows in found for r in rows if r["variant"] == "flash" and r["null_max"] != 0]
    if differing:
        first = differing[0]
        errors.print(
            f"[bold red]assay {command}:[/] {len(differing)} points differ from themselves when computed again, first "
            f"{first['id']} ({first['plan']}, seed {first['seed']}) by {first['null_max']:.1e}. No figure of this run "
            "can be trusted.",
            soft_wrap=True,
        )
        raise typer.Exit(1)
