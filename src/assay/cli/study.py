"""`assay study`: a recipe, its sweeps and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.messages import errors, refusing, this_command
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
    from assay.cli.reporting import can_report, print_claims, remember, write
    from assay.cli.running import check, run_sweeps
    from assay.recipes.study import find_study
    from assay.results.lines import all_records

    with refusing("study", ValueError):
        found = find_study(recipe)
        place = find_device(device)
    file, _, function = recipe.partition(":")
    folder = out or Path("runs") / "-".join(filter(None, (Path(file).stem, function)))
    rows = run_sweeps("study", found.sweeps, folder, place, jobs)
    missing = can_report()
    with refusing("study", ValueError, OSError):
        remember(folder, asked=found.asked, command=this_command())
        if missing:
            print_claims(all_records(folder), as_json)
            words = f"No page: {missing}. Elsewhere, `assay report {folder}` makes it from the records."
            errors.print(words, soft_wrap=True, markup=False)
        else:
            reading, page = write(folder)
            print_claims(reading.rows, as_json)
            if not as_json:
                typer.echo(f"Report: {page.resolve()}")
    check("study", rows)
