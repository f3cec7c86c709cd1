"""`assay sweep`: a grid of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli.messages import errors, print_table, refusing

OUT_HELP = "Folder of the records. What is there already is not measured again."


def _several(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _inputs(texts: list[str] | None) -> tuple[str, ...] | None:
    """Names separated by commas; a path may have commas in it."""
    if texts is None:
        return None
    found = [name for text in texts for name in ([text] if text.startswith("file:") else text.split(","))]
    return tuple(dict.fromkeys(name.strip() for name in found))


def _measured_on(
    name: str, source: Path | None, texts: list[str] | None, seeds: int | None, formats: str | None
) -> dict[str, Any]:
    """The inputs, seeds and formats asked for. A captured call brings all its heads, and its format."""
    asked = {"inputs": _inputs(texts), "seeds": seeds, "formats": _several(formats)}
    if source is None:
        return asked
    from assay.cases.attention.captured import captured
    from assay.cases.attention.inputs import FROM_FILE
    from assay.sweeps.grid import SWEEPS

    if texts is not None:
        raise ValueError(f"--from takes the place of --inputs; for several, use --inputs {FROM_FILE}{source} and more.")
    call = captured(source)
    asked |= {"inputs": (f"{FROM_FILE}{source}",), "seeds": seeds or call.heads}
    if formats is None and name in SWEEPS and "formats" not in SWEEPS[name].defaults:
        asked["formats"] = (call.format,)
    return asked


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"--{name} takes whole numbers separated by commas, got {text!r}.") from None


def _block(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    rows, times, columns = text.lower().replace("×", "x").partition("x")
    if not times or not (rows.isascii() and rows.isdigit() and columns.isascii() and columns.isdigit()):
        raise ValueError(f"--block is rows x columns, such as 64x128; got {text!r}.")
    return int(rows), int(columns)


def sweep(
    name: Annotated[str, typer.Argument(help="precision, length, blocks, steps, inputs or kernels.")],
    out: Annotated[Path | None, typer.Option(help=OUT_HELP + " Default: runs/NAME.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Sequence length.")] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Head dimension.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Mask the future.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Draws of the inputs.  [default: 5]")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(help="uniform,normal,outliers,tied,low_rank,large_logits or file:PATH. Repeat it."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A captured call, such as `assay watch` saves: safetensors with q, k and v."),
    ] = None,
    formats: Annotated[str | None, typer.Option(help="Such as bf16,fp16,e5m6.")] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            help="uniform, fp32_state, shipped, eager, or with changed steps: uniform,row_sum=fp32. Repeat it."
        ),
    ] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="Plan of the baseline, as --plan. Repeat it.")] = None,
    order: Annotated[str | None, typer.Option(help="fa1, fa2 or split_kv.  [default: fa1]")] = None,
    sram: Annotated[int | None, typer.Option(min=1, help="Elements of fast memory, for the paper's block.")] = None,
    block: Annotated[str | None, typer.Option(help="Rows x columns, such as 64x128, instead of --sram.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Of the sweep `length`, separated by commas.")] = None,
    srams: Annotated[str | None, typer.Option(help="Of the sweep `blocks`, separated by commas.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: the cores; 1 on CUDA]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON lines and nothing else.")] = False,
) -> None:
    """Measure one grid; each point is a record in the folder.

    Stopped at any moment, the same command goes on where it was. Exits with 1 if the null, flash against itself,
    is not exactly 0 everywhere.
    """
    from assay.cli.devices import find_device
    from assay.cli.replay import replay_scored
    from assay.cli.running import check, run_sweeps
    from assay.results.record import to_json
    from assay.sweeps.grid import SWEEPS, default_sweep
    from assay.watching.captured_call import scoring

    folder = out or Path("runs") / name
    with refusing("sweep", ValueError):
        had = () if source is None else scoring(source)
        if source is not None and had:
            others = {
                "inputs": inputs, "batch": batch, "heads": heads, "length": length, "dim": dim, "causal": causal,
                "seeds": seeds, "formats": formats, "baseline": baseline, "order": order, "sram": sram, "block": block,
                "lengths": lengths, "srams": srams, "jobs": jobs,
            }  # fmt: skip
            replay_scored(name, source, had, plan, device, folder, as_json, others)
            return
        asked = default_sweep(
            name,
            batch=batch,
            heads=heads,
            length=length,
            dim=dim,
            causal=causal or None,
            **_measured_on(name, source, inputs, seeds, formats),
            plans=None if plan is None else tuple(dict.fromkeys(plan)),
            baselines=None if baseline is None else tuple(dict.fromkeys(baseline)),
            order=order,
            sram=sram,
            block=_block(block),
            lengths=_numbers("lengths", lengths),
            srams=_numbers("srams", srams),
        )
        place = find_device(device)
    if not as_json:
        errors.print(SWEEPS[name].question)
    found = run_sweeps("sweep", [asked], folder, place, jobs)
    if as_json:
        for record in found[0]:
            typer.echo(to_json(record))
    else:
        show_sweep(found[0])
        typer.echo(f"Records: {folder}. A page of them: assay report {folder}")
    check("sweep", found)


def show_sweep(rows: list[dict[str, object]]) -> None:
    """The table of a sweep; of `steps` the attribution."""
    from assay.report.attribution import attribute
    from assay.report.attribution import table as attribution_table
    from assay.report.claims import unsteady_kernels
    from assay.report.summary import summarize

    if rows and rows[0]["sweep"] == "steps":
        attributions = attribute(rows)
        if not attributions:
            typer.echo("Too few seeds for an interval: use --seeds 2 or more.")
            return
        for attribution in attributions:
            print_table(attribution_table(attribution))
        typer.echo(
            "owns: share of the mean square error, mean over random orders of raising the steps; all add up to 100.\n"
            "alone: with only this step low. saves: gone if only this step is raised; below 0, raising it alone harms."
        )
    elif rows:
        for found in summarize(rows):
            print_table(found)
        for line in unsteady_kernels(rows):
            typer.echo(line)
