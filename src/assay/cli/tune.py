"""`assay bench tune`: the table of tiles that `flash_attention` reads, measured on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from assay.cli.messages import errors, progress_bar, refusing

_NAME = "bench tune"


def tune(
    out: Annotated[Path | None, typer.Option(help="The table. Default: where flash_attention looks for it.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel. Repeat it.")] = None,
    dim: Annotated[list[int] | None, typer.Option(help="Only this head dimension: 64, 128, 256. Repeat it.")] = None,
) -> None:
    """Time the tiles of every kernel on this GPU and write the table of the fastest.

    Rows that are not measured stay as they are. Ctrl-C writes what was found.
    """
    import torch

    from assay._files import write_whole
    from assay.bench.tune import DIMS, Task, compile_all, count, measure, merged, tasks
    from assay.flash.tuning import KERNELS, Tile, file_name, folder

    with refusing(_NAME, ValueError, OSError):
        if not torch.cuda.is_available():
            raise ValueError("tiles belong to a GPU's kernels, and this machine has no CUDA device.")
        for given, known, what in ((kernel, KERNELS, "--kernel"), (dim, DIMS, "--dim")):
            if set(given or ()) - set(known):
                raise ValueError(f"{what} is one of {', '.join(map(str, known))}; got {given}.")
        device = torch.cuda.get_device_name()
        path = out or folder() / file_name(device)
        write_whole(path, merged(path, device, {}).encode())  # refused now rather than after all the timing
    wanted = tasks(tuple(kernel or KERNELS), tuple(dim or DIMS))
    found: dict[Task, Tile] = {}
    try:
        with progress_bar() as progress:
            bar = progress.add_task("compiling", total=count(wanted) + len(wanted))
            for task in compile_all(wanted):
                progress.update(bar, advance=1, description=escape(f"compiling {task.kernel}, {task.row}, {task.dim}"))
            for task in wanted:
                progress.update(bar, description=escape(f"timing {task.kernel}, {task.row}, {task.dim}"))
                best = measure(task)
                if best is not None:
                    found[task] = best[0]
                    typer.echo(f"{task.kernel:13} {task.row:13} {task.dim:3}: {tuple(best[0])} {best[1] * 1e3:.3f} ms")
                progress.advance(bar)
    except KeyboardInterrupt:
        errors.print("Stopped before the end.")
    finally:
        write_whole(path, merged(path, device, found).encode())
        typer.echo(f"Wrote {path}")
