"""A point as a table for people, at most 100 columns wide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from assay.bench.contenders import OURS
from assay.bench.figures import Figure, Point, in_tera
from assay.bench.memory import in_units
from assay.bench.shapes import Pass

NOTHING = "–"


def table_of(point: Point) -> Table:
    """Contenders down, figures across; forward above, forward and backward below."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    with_graphs = any(figure.graph_samples for figure in point.figures)
    table.add_column("\nforward", no_wrap=True)
    names = ("\nms", *(["graph\nms"] if with_graphs else []), "\nTFLOP/s", "of the\nceiling", "peak\nmemory")
    for name in (*names, "tokens\n/s", "×\nstandard", "× best\nother"):
        table.add_column(name, justify="right", no_wrap=True)
    for which in _passes(point):
        figures = point.of(which)
        if which != "forward":
            table.add_section()
            table.add_row(f"[bold]{which.replace('+', ' + ')}[/]")
        columns = _columns(point, figures, with_graphs)
        for i, figure in enumerate(figures):
            style = "bold" if figure.contender == OURS else None
            table.add_row(escape(figure.contender), *(column[i] for column in columns), style=style)
    return table


def title_of(point: Point) -> str:
    """The shape, the dtype, and the ceiling."""
    shape = point.shape
    heads = (
        f"{shape.heads} heads" if shape.heads == shape.kv_heads else f"{shape.heads} heads, {shape.kv_heads} of K, V"
    )
    ceiling = in_tera(point.ceiling)
    matmul = "" if ceiling is None else f"; matmul {_three_digits(ceiling)} TFLOP/s"
    mask = "causal" if shape.causal else "full"
    return f"{shape.name}, D {shape.dim}: batch {shape.batch}, {heads}, {mask}, {point.dtype}{matmul}"


def notes_of(point: Point) -> list[str]:
    """Why a figure is missing."""
    lines = [] if point.reason is None else [f"Not measured: {point.reason}"]
    told = set()
    for figure in point.figures:
        if figure.reason is not None and (figure.contender, figure.reason) not in told:
            told.add((figure.contender, figure.reason))
            lines.append(f"{figure.contender}, {figure.which}: {figure.reason}")
        elif not figure.samples:
            lines.append(f"{figure.contender}, {figure.which}: not reached")
        if figure.graph_reason is not None:
            lines.append(f"{figure.contender} cannot be captured as a CUDA graph: {figure.graph_reason}")
    return list(dict.fromkeys(lines))


def _passes(point: Point) -> list[Pass]:
    return list(dict.fromkeys(figure.which for figure in point.figures))


def _columns(point: Point, figures: Sequence[Figure], with_graphs: bool) -> list[list[str]]:
    def column(value: Callable[[Figure], float | None], factor: float = 1.0) -> list[str]:
        values = [value(figure) for figure in figures]
        return _aligned([None if x is None else factor * x for x in values])

    return [
        column(lambda f: f.seconds, 1e3),
        *([column(lambda f: f.graph_seconds, 1e3)] if with_graphs else []),
        column(lambda f: in_tera(point.flop_rate(f))),
        [NOTHING if (x := point.ceiling_share(f)) is None else f"{x:.0%}" for f in figures],
        [NOTHING if f.peak_bytes is None or not f.samples else in_units(f.peak_bytes) for f in figures],
        [NOTHING if (x := point.token_rate(f)) is None else _in_thousands(x) for f in figures],
        [NOTHING if (x := point.over_standard(f)) is None else f"{x:.2f}" for f in figures],
        [NOTHING if (x := point.over_best_other(f)) is None else f"{x:.2f}" for f in figures],
    ]


def _aligned(values: Sequence[float | None]) -> list[str]:
    """The same decimals down the column: such that the smallest shows three digits."""
    there = [x for x in values if x is not None and x > 0]
    decimals = min(5, _decimals(min(there))) if there else 0
    return [NOTHING if x is None else f"{x:.{decimals}f}" for x in values]


def _decimals(value: float) -> int:
    """So many that three digits show."""
    return max(0, 2 - math.floor(math.log10(value)))


def _three_digits(value: float) -> str:
    return f"{value:.{_decimals(value)}f}"


def _in_thousands(rate: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{_three_digits(rate / size)} {unit}"
    return _three_digits(rate)
