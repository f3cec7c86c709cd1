"""`assay study`: a recipe, its sweeps and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.messages import refusing
from assay.cli.sweep import OUT_HELP


def study(
    recipe: Annotated[str, typer.Argument(help="quick, paper, full, or a file of yours: my_file.py:function.")],
    out: Annotated[Path | None, typer.Option(help=OUT_HELP + " Default: runs/RECIPE.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: the cores; 1 on CUDA]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON and nothing else.")] = False,
) -> None:
    """Run a recipe's sweeps, judge the paper's claims by them, and write the report.

    Stopped at any moment, the same command goes on where it was.
    """
    from assay.cli.devices import find_device
    from assay.cli.reporting import conclude
    from assay.cli.running import check, run_sweeps
    from assay.recipes.study import find_study

    with refusing("study", ValueError):
        found = find_study(recipe)
        place = find_device(device)
    file, _, function = recipe.partition(":")
    folder = out or Path("runs") / "-".join(filter(None, (Path(file).stem, function)))
    rows = run_sweeps("study", found.sweeps, folder, place, jobs)
    conclude("study", folder, asked=found.asked, as_json=as_json, claims=True)
    check("study", rows)
