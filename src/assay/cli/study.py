"""`assay study`: a recipe, its sweeps and its report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.cli.messages import errors, refusing
from assay.cli.pair import finish, train
from assay.cli.sweep import OUT_HELP

if TYPE_CHECKING:
    from assay.training.session import Outcome
    from assay.training.training import PairStudy


def study(
    recipe: Annotated[str, typer.Argument(help="quick, paper, full, or a file of yours: my_file.py:function.")],
    out: Annotated[Path | None, typer.Option(help=OUT_HELP + " Default: runs/RECIPE.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: the cores; 1 on CUDA]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON and nothing else.")] = False,
) -> None:
    """Run a recipe's sweeps and paired trainings, judge the paper's claims by them, and write the report.

    Stopped at any moment, the same command goes on where it was.
    """
    from assay.cli.devices import find_device
    from assay.cli.reporting import conclude
    from assay.cli.running import check, run_sweeps
    from assay.recipes.study import find_study
    from assay.results.lines import all_records
    from assay.results.training_record import TRAINING

    with refusing("study", ValueError):
        found = find_study(recipe)
        place = find_device(device)
    file, _, function = recipe.partition(":")
    folder = out or Path("runs") / "-".join(filter(None, (Path(file).stem, function)))
    rows = run_sweeps("study", found.sweeps, folder, place, jobs)
    outcome = None if found.pairs is None else _pairs(found.pairs, folder, place, recipe, jobs)
    conclude("study", folder, asked=found.asked, as_json=as_json, claims=True)
    check("study", rows)
    if outcome is not None:
        finish("study", outcome, all_records(folder, TRAINING), folder)


def _pairs(pairs: PairStudy, folder: Path, device: str, recipe: str, jobs: int | None) -> Outcome | None:
    """None where their data cannot be had: the sweeps are worth a report without them."""
    try:
        return train("study", pairs, folder, device, recipe, jobs=jobs)
    except ModuleNotFoundError as error:
        errors.print(f"No paired trainings: {error}", style="yellow", markup=False, soft_wrap=True)
        return None
