"""`assay pair`: trainings that differ in one thing, and how their weights part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from assay.cli.messages import errors, print_table, progress_bar, refusing, this_command
from assay.cli.sweep import OUT_HELP

if TYPE_CHECKING:
    from assay.results.record import Record
    from assay.training.session import Outcome
    from assay.training.training import PairStudy


def pair(
    recipe: Annotated[
        str, typer.Argument(help="quick, paper, full, speed, long, gpt, or a file of yours: my_file.py:function.")
    ],
    out: Annotated[Path | None, typer.Option(help=OUT_HELP + " Default: runs/pair-RECIPE.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    data: Annotated[str | None, typer.Option(help="Other data: saved:FILE, folder:DIR, tar:FILE, file:TEXT.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after about so long; run it again to go on.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Seeds at a time.  [default: the cores; 1 on CUDA]")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for it to DIR/tensorboard.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what each pair came to as JSON.")] = False,
) -> None:
    """Train pairs that differ in exactly one thing, in lockstep, and compare their weights at chosen steps.

    Stopped at any moment, the same command goes on where it was, to the same bits.
    """
    from dataclasses import replace

    from assay.cli.devices import find_device
    from assay.cli.reporting import conclude
    from assay.recipes.files import find_recipe
    from assay.recipes.pairs import PAIR_RECIPES
    from assay.results.lines import all_records
    from assay.results.training_record import TRAINING
    from assay.training.training import PairStudy

    with refusing("pair", ValueError):
        study = find_recipe(recipe, PAIR_RECIPES, PairStudy)
        if data is not None:
            study = replace(study, trainings={name: replace(t, data=data) for name, t in study.trainings.items()})
        place = find_device(device)
    file, _, function = recipe.partition(":")
    folder = out or Path("runs") / "-".join(filter(None, ("pair", Path(file).stem, function)))
    outcome = train("pair", study, folder, place, recipe, None if minutes is None else minutes * 60, jobs, tensorboard)
    rows = [row for row in all_records(folder, TRAINING) if row["recipe"] == recipe]
    tell(rows, as_json)
    if outcome.finished:
        conclude("pair", folder, asked=study.asked, as_json=as_json, claims=False)
    finish("pair", outcome, rows, folder)


def train(
    command: str,
    study: PairStudy,
    folder: Path,
    device: str,
    recipe: str,
    seconds: float | None = None,
    jobs: int | None = None,
    tensorboard: bool = False,
) -> Outcome:
    """Run what the folder lacks, with a progress bar. Ctrl-C says how to go on, and exits with 130."""
    from assay.executors.local import cores
    from assay.results.store import StoreError
    from assay.training.session import run_pairs

    if jobs is None:
        jobs = cores() if device == "cpu" else 1
    steps = next(iter(study.trainings.values())).steps
    with progress_bar() as progress:
        bar = progress.add_task("training", total=len(study.seeds) * len(study.trainings) * steps)

        def show(done: int, words: str) -> None:
            progress.update(bar, completed=done, description=escape(words) or None)

        try:
            with refusing(command, ValueError, OSError, StoreError, MemoryError, RuntimeError):
                return run_pairs(
                    study,
                    folder,
                    device,
                    recipe=recipe,
                    seconds=seconds,
                    jobs=jobs,
                    tensorboard=tensorboard,
                    tell=show,
                )
        except KeyboardInterrupt:
            progress.stop()
            errors.print(f"Stopped. Go on with: {this_command()}", soft_wrap=True, markup=False)
            raise typer.Exit(130) from None


def tell(rows: list[Record], as_json: bool) -> None:
    """The table and the verdicts."""
    from assay.report.pair_summary import pair_table, verdicts

    table = pair_table(rows)
    if as_json:
        lines = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        typer.echo(json.dumps({"pairs": lines, "verdicts": verdicts(rows)}, ensure_ascii=False))
        return
    print_table(table)
    for sentence in verdicts(rows):
        typer.echo(sentence)


def finish(command: str, outcome: Outcome, rows: list[Record], folder: Path) -> None:
    """What a person must know; exit 1 if a null is not 0."""
    from assay.report.pair_summary import nulls

    if outcome.apart:
        errors.print("The trainings did not fit into memory together: they ran one after the other, through snapshots.")
    for name, why in outcome.stopped.items():
        errors.print(f"{name} was stopped: {why}.", style="yellow", markup=False, soft_wrap=True)
    if not outcome.finished:
        errors.print(f"Time is up; saved in {folder}. Go on with: {this_command()}", markup=False, soft_wrap=True)
    wrong = nulls(rows)
    if wrong:
        first = wrong[0]
        errors.print(
            f"[bold red]assay {command}:[/] the same training twice came to differ, first at step {first['step']} "
            f"(seed {first['seed']}) by {first['max']:.1e}. No figure of this run can be trusted.",
            soft_wrap=True,
        )
        raise typer.Exit(1)
