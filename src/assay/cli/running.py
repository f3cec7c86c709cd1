"""Running sweeps from a command: progress, Ctrl-C, checks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from assay.cli.messages import errors, progress_bar, refusing, this_command

if TYPE_CHECKING:
    from assay.results.record import Record
    from assay.sweeps.grid import Sweep


def run_sweeps(
    command: str, sweeps: Sequence[Sweep], folder: Path, device: str, jobs: int | None
) -> list[list[Record]]:
    """The records of each sweep, measured now or before. Ctrl-C says how to go on, and exits with 130."""
    from assay.executors.local import cores
    from assay.results.environment import code_version
    from assay.results.lines import records_of
    from assay.results.store import StoreError
    from assay.sweeps.run import run_points

    with refusing(command, ValueError):
        grids = [sweep.points(device) for sweep in sweeps]
    if jobs is None:
        jobs = cores() if device == "cpu" else 1
    points = [point for grid in grids for point in grid]
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(points))
        try:
            with refusing(command, ValueError, StoreError, BrokenProcessPool, MemoryError, RuntimeError):
                ids = run_points(
                    points, folder, device, jobs, lambda done, total: progress.update(task, completed=done, total=total)
                )
        except KeyboardInterrupt:
            progress.stop()
            there = f"Stopped with {int(progress.tasks[0].completed)} of {len(points)} points in {folder}."
            errors.print(f"{there} Go on with: {this_command()}", soft_wrap=True, markup=False)
            raise typer.Exit(130) from None
    found = {record["id"]: record for record in records_of(folder, ids)}
    refused = sorted({point.variant for point, key in zip(points, ids, strict=True) if key not in found})
    if refused:
        words = f"Not measured, since they do not take these inputs: {', '.join(refused)}."
        errors.print(words, style="yellow", soft_wrap=True, markup=False)
    here = code_version()
    others = sorted({record["code"] for record in found.values()} - {here})
    if others:
        words = f"Some of these records were measured before, by {', '.join(others)}; this is {here}. To measure all "
        errors.print(f"{words}again, name another folder with --out.", style="yellow", soft_wrap=True, markup=False)
    left = iter(ids)
    return [[found[key] for key in dict.fromkeys(islice(left, len(grid))) if key in found] for grid in grids]


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
