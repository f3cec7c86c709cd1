"""`assay validate`: the emulation beside every real kernel of this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from assay.cli.messages import progress_bar, refusing

if TYPE_CHECKING:
    from assay.cases.attention.validate import Agreement


def validate(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    formats: Annotated[str, typer.Option(help="Input formats, separated by commas.")] = "bf16,fp16",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    length: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 1024,
    dim: Annotated[int, typer.Option(min=1, max=256, help="Head dimension.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page that opens offline.")] = None,
) -> None:
    """Check the numeric re-implementation against the real attention kernels of this machine.

    Exits with 1 if an emulation's RMSE against golden is not within 2% of its kernel's.
    """
    import torch

    from assay.cases.attention.kernels import available_kernels
    from assay.cases.attention.validate import validate as run
    from assay.cli.devices import find_device

    if html is not None:
        _check_writable(html)
    rows: list[Agreement] = []
    names = tuple(dict.fromkeys(name.strip() for name in formats.split(",")))
    with refusing("validate", ValueError, MemoryError, RuntimeError), progress_bar() as progress:
        place = find_device(device)
        total = len(available_kernels(torch.device(place))) * len(names) * 2 * 4  # full and causal, four tensors
        task = progress.add_task("golden, kernel and emulation", total=total)
        for row in run(device=place, formats=names, shape=(batch, heads, length, dim), seed=seed):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.kernel}, {row.format}, {row.part}")
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows]))
    else:
        _print(rows)
    if html is not None:
        from assay.report.validation import write_page

        write_page([row.as_dict() for row in rows], html)
        if not as_json:
            Console().print(f"Report: {html.resolve()}", soft_wrap=True)
    if not all(row.matches for row in rows):
        raise typer.Exit(1)


def _check_writable(path: Path) -> None:
    """Refuse a page that cannot be written before anything is measured."""
    with refusing("validate", OSError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a folder; name a file in it, e.g. {path / 'index.html'}")
            with tempfile.NamedTemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise OSError(f"the page cannot be written: {error}.") from None


def _print(rows: list[Agreement]) -> None:
    """A table for each kernel, narrow enough for a terminal of 80 columns."""
    console = Console()
    console.print(
        f"{rows[0].device}, (batch, heads, length, dim) = {rows[0].shape}, inputs {rows[0].distribution}, "
        f"seed {rows[0].seed}.\nRMSE against golden; ratio = emulation / kernel, for the kernel's own plan and for "
        "the shipped one; % of elements by the ULPs between kernel and emulation.",
        soft_wrap=True,
    )
    for kernel, fmt in dict.fromkeys((row.kernel, row.format) for row in rows):
        group = [row for row in rows if (row.kernel, row.format) == (kernel, fmt)]
        title = f"{kernel}: {group[0].plan}; block {group[0].tiling}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        table.add_column("tensor", no_wrap=True)
        for name in ("kernel", "emulated", "ratio", "shipped", "equal", "  0 ≤½ ≤1 ≤2 ≤4 >4"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in group:
            table.add_row(
                f"{row.part}{' causal' if row.causal else ''}",
                f"{row.kernel_rmse:.2e}",
                f"{row.emulation_rmse:.2e}",
                f"[{'green' if row.matches else 'red'}]{row.ratio:.3f}[/]",
                f"{row.shipped_ratio:.3f}",
                f"{row.bit_equal:.1%}",
                "".join(f"{100 * share:3.0f}" for share in row.ulp_shares),
            )
        console.print(table)
        for note in group[0].notes:
            console.print(f"  {note}", style="dim")
