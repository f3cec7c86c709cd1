"""`assay sweep inputs --from FILE` where the call had softcap or sinks: not a grid, but the same question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from assay.cli.messages import errors, print_table
from assay.report.summary import Table

if TYPE_CHECKING:
    from assay.watching.replay import Replayed


def replay_scored(
    name: str, source: Path, had: Sequence[str], plans: list[str] | None, device: str, folder: Path,
    as_json: bool, others: Mapping[str, Any],
) -> None:  # fmt: skip
    """Make the call again by all who can, and say who cannot; `others` are options that have no meaning here."""
    from assay.cli.devices import find_device
    from assay.results.watch_record import WATCH
    from assay.sweeps.grid import default_sweep
    from assay.watching.captured_call import captured_call
    from assay.watching.replay import replay

    what = " and ".join(had)
    if name != "inputs":
        raise ValueError(f"A call that had {what} is made again by `assay sweep inputs`, not by {name}.")
    given = [option for option, value in others.items() if value]
    if given:
        raise ValueError(f"A call that had {what} is made again as it was. Leave out --{given[0]}.")
    call, layer = captured_call(source)
    found = replay(call, layer, plans or default_sweep(name).plans, find_device(device), folder)
    if as_json:
        for row in found.rows:
            typer.echo(WATCH.to_json(row))
        return
    print_table(_table(source, layer, found))
    for who, why in found.cannot.items():
        errors.print(f"Not made again by {who}: {why}.", soft_wrap=True, highlight=False)
    typer.echo(f"Records: {folder}. A page of them: assay report {folder}")


def _table(source: Path, layer: str, found: Replayed) -> Table:
    from assay.results.watched import compared, head_cell

    call, rows = found.call, list[tuple[str, ...]]()
    for one in compared(found.rows):
        row = one.whole
        over = "yes" if one.over is not None else ""
        cells = (f"{row['ratio_rmse']:.2f}", head_cell([one]), f"{row['error_max']:.2e}", over)
        rows.append((row["implementation"], *cells))
    shape = " × ".join(map(str, call.q.shape))
    how = [] if call.softcap is None else [f"softcap {call.softcap:g}"]
    how += [] if call.sinks is None else ["sinks"]
    parts = (source.name, layer, f"{found.rows[0]['format']} {shape}", *how, found.rows[0]["device"])
    place = ", ".join(filter(None, parts))
    columns = ("made again by", "error / baseline's", "worst head", "largest error", "over budget")
    return Table(place, columns, tuple(rows), 1)
