"""The picture and the table of a record that `bench_record.py --json` wrote.

    python benchmarks/plot_record.py record.json docs/images/record.svg
    python benchmarks/plot_record.py record.json --markdown

The picture: TFLOP/s against the length, a panel for each pass, mask and head dimension; the matmul rate of the same run
as a line. The table, for the docs: the same figures at the longest length, and the ratios over all lengths.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, it finds the others here

from assay._files import write_whole
from assay.report.palette import LIGHT
from assay.report.static_figures import STYLE
from benchmarks.record import CUDNN, FA2, FLEX, OURS, Part, Point, Record, geometric_mean, judged, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = {
    OURS: (LIGHT[0], "o", 2.2),
    CUDNN: (LIGHT[1], "s", 1.3),
    FA2: (LIGHT[2], "D", 1.3),
    FLEX: (LIGHT[3], "^", 1.3),
}
"""Colour, marker and width of each line."""
PASSES: dict[Part, str] = {"forward": "Forward", "backward": "Backward", "both": "Forward + backward"}
_GREY, _DARK = "#57606c", "#1f2328"


def picture(record: Record, kind: str) -> bytes:
    """The figure as an `svg` or a `png`."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 8.4), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure, record)
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=130, metadata=metadata)
    return buffer.getvalue()


def _draw(figure: Figure, record: Record) -> None:
    rows: list[tuple[Part, bool]] = [
        (part, causal)
        for part in ("forward", "backward")
        for causal in (False, True)
        if any(point.causal == causal for point in record.of(part))
    ]
    dims = sorted({point.dim for part, _ in rows for point in record.of(part)})
    if not rows:
        raise ValueError("A picture needs plain forward or backward points, and this record has none. Measure them.")
    panels = figure.subplots(len(rows), len(dims), sharex=True, sharey=True, squeeze=False)
    for (part, causal), line in zip(rows, panels, strict=True):
        for dim, axes in zip(dims, line, strict=True):
            found = [point for point in record.of(part) if (point.dim, point.causal) == (dim, causal)]
            _panel(axes, sorted(found, key=lambda point: point.length), record)
        line[0].set_ylabel(f"{PASSES[part]}, {'causal' if causal else 'full'}\nTFLOP/s", color=_DARK)
    for dim, axes in zip(dims, panels[0], strict=True):
        axes.set_title(f"D {dim}", fontweight="bold", color=_DARK, pad=10)
    for axes in panels[-1]:
        axes.set_xlabel("length N", color=_DARK)
    _around(figure, panels[0][0], record)


def _panel(axes: Axes, points: Sequence[Point], record: Record) -> None:
    ceiling = matmul(record)
    if ceiling:
        axes.axhline(ceiling, color=_GREY, linewidth=1.1, linestyle=(0, (4, 2)))
    for who, (colour, marker, width) in reversed(SERIES.items()):  # ours on top
        drawn = [(point.length, rate) for point in points if (rate := point.rate(who)) is not None]
        axes.plot(
            [length for length, _ in drawn],
            [rate for _, rate in drawn],
            color=colour,
            marker=marker,
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            linewidth=width,
            label=who,
        )
        if who == OURS and drawn:
            axes.annotate(
                f"{drawn[-1][1]:.0f}",
                drawn[-1],
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=colour,
            )
    lengths = sorted({point.length for part in ("forward", "backward") for point in record.of(part)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlim(0.8 * lengths[0], 1.9 * lengths[-1])  # with room for the figure at the end of ours
    rates = [rate for part in PASSES for point in record.of(part) if (rate := point.rate(OURS)) is not None]
    axes.set_ylim(0, 1.1 * max([ceiling or 0.0, *rates]))


def _around(figure: Figure, first: Axes, record: Record) -> None:
    """Title and legend."""
    from matplotlib.lines import Line2D

    found = dict(zip(*reversed(first.get_legend_handles_labels()), strict=True))
    shown = {who for point in record.points for who in point.ms}
    handles = [found[who] for who in SERIES if who in shown]
    names = [who for who in SERIES if who in shown]
    ceiling = matmul(record)
    if ceiling:
        handles.append(Line2D([], [], color=_GREY, linewidth=1.1, linestyle=(0, (4, 2))))
        names.append(f"matmul 8192³ in the same run ({ceiling:.0f})")
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), handlelength=2.6, columnspacing=2.2)
    figure.suptitle(
        f"Attention in bf16 on one {record.environment['device']}\n", x=0.008, ha="left", fontsize=12, fontweight="bold"
    )
    figure.text(0.008, 0.962, measured_with(record), ha="left", va="top", fontsize=8, color=_GREY)


def measured_with(record: Record) -> str:
    """Shape, versions and date."""
    with_it = record.environment
    return (
        f"16,384 tokens, hidden size 2048, kernels alone (CUDA graphs); torch {with_it['torch']}, Triton "
        f"{with_it['triton']}, cuDNN {_dotted(with_it.get('cudnn'))}; {record.date[:10]}"
    )


def _dotted(version: int | None) -> str:
    """91900 is 9.19.0."""
    return "?" if version is None else f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def matmul(record: Record) -> float | None:
    """The median TFLOP/s of the matrix product over the run."""
    rates = [point.matmul for point in record.points if point.matmul]
    return statistics.median(rates) if rates else None


def markdown(record: Record) -> str:
    """What the docs show: figures, then goals."""
    ceiling = matmul(record)
    head = f"One {record.environment['device']}, bf16, {measured_with(record)}"
    return "\n".join(
        [
            f"{head}{f'; matmul {ceiling:.0f} TFLOP/s' if ceiling else ''}.",
            "",
            *_speeds(record),
            "",
            "| goal | wanted | measured | |",
            "|---|---|---|---|",
            *(
                f"| {v.name} | {v.wanted} | {v.shown} ({v.of}) | {'met' if v.met else '**missed**'} |"
                for v in judged(record)
                if v.measured is not None
            ),
        ]
    )


def _speeds(record: Record) -> Iterator[str]:
    others = [who for who in (CUDNN, FA2, FLEX) if any(who in point.ms for point in record.points)]
    plain = [point for point in record.points if point.kind == "plain"]
    longest = max((point.length for point in plain), default=0)
    yield (
        f"| | TFLOP/s at N {longest:,}, full / causal | of the matmul rate (full, there), ours / cuDNN "
        f"| {' | '.join(f'over {who}' for who in others)} |"
    )
    yield "|---" * (3 + len(others)) + "|"
    for part, name in PASSES.items():
        for dim in sorted({point.dim for point in record.of(part)}):
            points = [point for point in record.of(part) if point.dim == dim]
            at_end = {point.causal: point.rate(OURS) for point in points if point.length == longest}
            rates = " / ".join(
                "–" if (rate := at_end.get(causal)) is None else f"{rate:.0f}" for causal in (False, True)
            )
            full = next((point for point in points if point.length == longest and not point.causal), None)
            shares = " / ".join(_share(full, who) for who in (OURS, CUDNN))
            ratios = " | ".join(_range(points, who) for who in others)
            yield f"| {name.lower()}, D {dim} | {rates} | {shares} | {ratios} |"


def _share(point: Point | None, who: str) -> str:
    """Of the matrix product's rate, timed in turn with it: what is left is all that anybody could gain."""
    rate = None if point is None else point.rate(who)
    return "–" if point is None or rate is None or not point.matmul else f"{rate / point.matmul:.0%}"


def _range(points: Sequence[Point], who: str) -> str:
    """Least to largest, and the mean of more than one."""
    ratios = [ratio for point in points if (ratio := point.over(who)) is not None]
    if not ratios:
        return "–"
    return f"{min(ratios):.2f}–{max(ratios):.2f}, mean {geometric_mean(ratios):.2f}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="what bench_record.py --json wrote")
    parser.add_argument("out", type=Path, nargs="?", help="the picture, .svg or .png")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    arguments = parser.parse_args(words)
    if arguments.out is None and not arguments.markdown:
        parser.error("Name a file for the picture (.svg or .png), or ask for the table with --markdown.")
    if arguments.out is not None and arguments.out.suffix not in (".svg", ".png"):
        parser.error(f"The picture must be an .svg or a .png, got {arguments.out}.")
    try:
        record = read(arguments.record)
        if arguments.out is not None:
            write_whole(arguments.out, picture(record, arguments.out.suffix[1:]))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.markdown:
        print(markdown(record))


if __name__ == "__main__":
    main()
