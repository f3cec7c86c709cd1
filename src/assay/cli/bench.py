"""`assay bench`: how fast attention is, beside every kernel of this machine."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from assay.cli.messages import errors, progress_bar, refusing
from assay.cli.tune import tune

if TYPE_CHECKING:
    import torch

    from assay.bench.contenders import Contender
    from assay.bench.outcome import Outcome
    from assay.bench.shapes import Pass, Shape

bench = typer.Typer(help="Speed and memory, beside every other kernel of this machine.", no_args_is_help=True)
bench.command()(tune)

_NAME = "bench attention"
_WIDTH = 100
"""Columns where nobody's terminal says."""


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What a kind of device is given to do: under a minute's work."""

    lengths: tuple[int, ...]
    dim: int
    tokens: int
    hidden: int
    dtype: str
    rounds: int


_DEFAULTS = {
    "cuda": _Defaults((512, 2048, 8192, 16384), 128, 16384, 2048, "bf16", 10),
    "cpu": _Defaults((256, 1024, 4096), 64, 4096, 256, "fp32", 3),
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A checked request."""

    shapes: list[Shape]
    contenders: list[Contender]
    device: torch.device
    dtype: str
    backward: bool
    rounds: int
    profile: bool


@bench.command()
def attention(
    length: Annotated[
        list[int] | None,
        typer.Option("--length", "-n", min=1, help="Repeat it. Default: 512, 2048, 8192, 16384; CPU: 256, 1024, 4096."),
    ] = None,
    dim: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="Head dimension. Repeat it. Default: 128; CPU: 64.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="In all: batch = tokens / length. Default: 16384; CPU: 4096.")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Width: heads = hidden / dim. Default: 2048; CPU: 256.")
    ] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V. Default: all.")] = None,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Mask the future, or nothing.")] = True,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16; CPU: fp32.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    backward: Annotated[bool, typer.Option(help="Also time forward and backward together.")] = True,
    only: Annotated[list[str] | None, typer.Option(help="A contender, by part of its name. Repeat it.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write everything there; - prints nothing else.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also show where the time of ours goes.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Samples of each; their median counts. Default: 10; CPU: 3.")
    ] = None,
) -> None:
    """Time our attention beside every kernel of this machine and standard attention.

    All take turns, on inputs larger than the cache; medians. Says where flash does
    not help. Ctrl-C prints what is there. Exits with 1 if nothing could be measured.
    """
    import torch

    from assay.bench.contenders import find_contenders
    from assay.bench.outcome import Outcome
    from assay.bench.shapes import grid
    from assay.cli.devices import find_device

    with refusing(_NAME, ValueError, OSError):
        place = torch.device(find_device(device))
        given = _DEFAULTS[place.type]
        shapes = grid(
            lengths=length or given.lengths,
            dims=dim or (given.dim,),
            tokens=tokens or given.tokens,
            hidden=hidden or given.hidden,
            kv_heads=kv_heads,
            causal=causal,
        )
        known = _known_dtype(dtype or given.dtype)
        contenders = find_contenders(place, only or ())
        _check_writable(json_file)
    asked = _Asked(shapes, contenders, place, known, backward, rounds or given.rounds, profile)
    outcome = Outcome(str(place), known, asked.rounds)
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        _run(asked, outcome)
    _tell(outcome, json_file)


def _known_dtype(name: str) -> str:
    from assay.bench.run import DTYPES

    if name not in DTYPES:
        raise ValueError(f"--dtype is one of {', '.join(DTYPES)}; got {name!r}.")
    return name


def _check_writable(name: str | None) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if name is None or name == "-":
        return
    path = Path(name)
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; name a file in it, e.g. {path / 'bench.json'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(f"the JSON cannot be written: {error}.") from None


def _run(asked: _Asked, outcome: Outcome) -> None:
    """Ctrl-C ends the run, not what was measured."""
    try:
        _measure(asked, outcome)
        if asked.profile:
            _profile(asked, outcome)
    except KeyboardInterrupt:
        return
    outcome.complete = True


def _measure(asked: _Asked, outcome: Outcome) -> None:
    from assay.bench.figures import Point
    from assay.bench.run import measure, samples_of

    counts = [samples_of(shape, len(asked.contenders), asked.backward, asked.rounds) for shape in asked.shapes]
    with progress_bar() as progress:
        task = progress.add_task("warming up", total=sum(counts))
        for i, shape in enumerate(asked.shapes):
            outcome.points.append(Point(shape=shape, dtype=asked.dtype))
            measure(
                outcome.points[-1],
                asked.contenders,
                backward=asked.backward,
                device=asked.device,
                rounds=asked.rounds,
                tick=lambda what: progress.update(task, advance=1, description=escape(what)),
            )
            progress.update(task, completed=sum(counts[: i + 1]))  # who refuses takes no turns


def _profile(asked: _Asked, outcome: Outcome) -> None:
    """Of ours, on every length; a shape that ours cannot do has no profile."""
    from assay.bench.contenders import OURS, find_contenders
    from assay.bench.profiling import profile_of

    ours = find_contenders(asked.device, [OURS])[0]
    which: Pass = "forward+backward" if asked.backward else "forward"
    for shape in asked.shapes:
        if not shape.few_queries:
            try:
                outcome.profiles.append(profile_of(ours, shape, which, asked.dtype, asked.device))
            except (RuntimeError, ValueError) as error:
                errors.print(f"No profile of {shape.name}, D {shape.dim}: {error}", style="yellow", markup=False)


def _tell(outcome: Outcome, json_file: str | None) -> None:
    """Print and write it, and end with what it is worth: 130 cut short, 1 with no figure."""
    from assay.bench.printing import show

    if json_file != "-":
        console = Console()
        show(outcome, console if console.is_terminal else Console(width=_WIDTH))
    if json_file is not None:
        _write(json_file, outcome)
    if not outcome.complete:
        errors.print("Stopped before the end. This is what was measured until then.")
        raise typer.Exit(130)
    if not outcome.measured:
        raise typer.Exit(1)


def _write(name: str, outcome: Outcome) -> None:
    from assay._files import write_whole
    from assay.results.environment import environment

    date = datetime.now(UTC).isoformat(timespec="seconds")
    document = {"date": date, "environment": environment(outcome.device), **outcome.as_dict()}
    text = json.dumps(document, indent=1)
    if name == "-":
        typer.echo(text)
    else:
        with refusing(_NAME, OSError):
            write_whole(Path(name), f"{text}\n".encode())
