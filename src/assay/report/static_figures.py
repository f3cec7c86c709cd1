"""Every figure as SVG and PNG for papers and slides: the same data and colours as the page, by Matplotlib."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from assay.report.charts import Chart, Series, Variant
from assay.report.heat import draw_heat
from assay.report.palette import DASHES, LIGHT, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# svg.hashsalt: the same records give the same bytes. Text stays text, so it can be searched and edited.
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "assay",
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#57606c",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 3.0,
    "text.parse_math": False,
    "axes.unicode_minus": True,
}


def file_name(chart: Chart, variant: Variant) -> str:
    """The name of a variant's files, without what follows the dot: safe on every system, one per variant."""
    if len(chart.variants) == 1:
        return chart.anchor
    words = _slug(variant)
    if [_slug(other) for other in chart.variants].count(words) > 1:
        words += f"-{chart.variants.index(variant) + 1}"
    return f"{chart.anchor}-{words}"


def _slug(variant: Variant) -> str:
    words = "-".join(value for _, value in variant.choices)
    return re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-").lower()[:60]


def static_figures(charts: Sequence[Chart]) -> Iterator[tuple[str, bytes]]:
    """(file name, its bytes) of every variant of every chart, SVG and PNG."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The report needs matplotlib: pip install 'assay[report]'", name="matplotlib"
        ) from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # a box stands for it
        for chart in charts:
            for variant in chart.variants:
                figure = Figure(figsize=_size(chart, variant), layout="constrained")
                FigureCanvasAgg(figure)
                _draw(figure, chart, variant)
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # laid out once, for both files
                for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
                    buffer = io.BytesIO()
                    figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
                    yield f"{file_name(chart, variant)}.{kind}", buffer.getvalue()


def _size(chart: Chart, variant: Variant) -> tuple[float, float]:
    if chart.kind == "heat":
        return 6.5, 1.3 + 0.16 * max(12, len(variant.series))
    if chart.kind == "hbar":
        return 6.5, 1.4 + 0.42 * max((len(series.x) for series in variant.series), default=1)
    return 6.5, 3.8


def _draw(figure: Figure, chart: Chart, variant: Variant) -> None:
    axes = figure.subplots()
    figure.suptitle(_cut(chart.title, 90), x=0.01, ha="left", fontsize=9.5, fontweight="bold")
    axes.set_title(_cut(variant.name, 100), loc="left", fontsize=8, color="#57606c")
    if chart.kind == "heat":
        draw_heat(figure, axes, chart, variant)
        return
    if chart.kind == "hbar":
        _draw_across(axes, variant)
    elif chart.kind == "bar":
        _draw_bars(axes, chart, variant)
    else:
        _draw_lines(axes, chart, variant)
    if chart.y_log and any(y > 0 for series in variant.series for y in series.y):
        axes.set_yscale("log", nonpositive="clip")
        _log_values(axes)
    if chart.x_log:
        _log_places(axes, variant)
    if chart.kind == "hbar":
        axes.set_xlabel(chart.y_title)
    else:
        axes.set(xlabel=chart.x_title, ylabel=chart.y_title)
    if chart.reference is not None:
        line = axes.axvline if chart.kind == "hbar" else axes.axhline
        line(chart.reference, color="#57606c", linewidth=0.9, linestyle=":" if chart.reference else "-")
    if len(variant.series) > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=_columns(variant))


def _columns(variant: Variant) -> int:
    """Of the legend: as many as fit beside each other."""
    longest = max(len(_cut(series.name)) for series in variant.series)
    return max(1, min(4, len(variant.series), 112 // (longest + 10)))


def _draw_lines(axes: Axes, chart: Chart, variant: Variant) -> None:
    faint = max(0.06, min(0.16, 0.5 / max(1, len(variant.series))))
    for series in variant.series:
        places = [chart.categories.index(str(x)) for x in series.x] if chart.categories else series.x
        colour = LIGHT[series.colour % len(LIGHT)]
        marker = MARKERS[series.colour % len(MARKERS)][1] if len(series.x) <= 30 else None
        values = [y if y > 0 or not (chart.band and chart.y_log) else math.nan for y in series.y]
        if chart.band:
            steps = [float(x) for x in series.x]
            axes.fill_between(steps, series.low, series.high, color=colour, alpha=faint, linewidth=0)
        axes.errorbar(
            places, values, yerr=None if chart.band else _whiskers(series), label=_cut(series.name), color=colour,
            marker=marker, linestyle=DASHES[series.dash % len(DASHES)][1],
            markersize=4.5, linewidth=1.5, elinewidth=1, capsize=2,
        )  # fmt: skip
    if chart.categories:
        _name_places(axes, chart.categories)


def _draw_bars(axes: Axes, chart: Chart, variant: Variant) -> None:
    categories = chart.categories or ()
    width = 0.75 / max(1, len(variant.series))
    base = chart.reference or 0.0
    for index, series in enumerate(variant.series):
        places = [categories.index(str(x)) + (index - (len(variant.series) - 1) / 2) * width for x in series.x]
        axes.bar(
            places, [y - base for y in series.y], width=0.92 * width, bottom=base, label=_cut(series.name),
            color=LIGHT[series.colour % len(LIGHT)],
        )  # fmt: skip
        axes.errorbar(places, series.y, yerr=_whiskers(series), fmt="none", ecolor="#1c2128", elinewidth=0.9, capsize=2)
    _name_places(axes, categories)


def _name_places(axes: Axes, categories: Sequence[str]) -> None:
    names = [_cut(name, 28) for name in categories]
    turned = sum(map(len, names)) > 64
    axes.set_xticks(range(len(names)), names, rotation=25 if turned else 0, ha="right" if turned else "center")


def _draw_across(axes: Axes, variant: Variant) -> None:
    heights = (0.42, 0.14, 0.14)
    offsets = (-0.14, 0.16, 0.32)
    for series, height, offset in zip(variant.series, heights, offsets, strict=True):
        places = [index + offset for index in range(len(series.x))]
        axes.barh(places, series.y, height=height, label=_cut(series.name), color=LIGHT[series.colour % len(LIGHT)])
        axes.errorbar(
            series.y, places, xerr=_whiskers(series), fmt="none", ecolor="#1c2128", elinewidth=0.9, capsize=1.5
        )
    names = variant.series[0].x
    axes.set_yticks(range(len(names)), [_cut(str(name), 28) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")


def _log_values(axes: Axes) -> None:
    """1, 2 and 5 of every decade where there are few decades; written out, since text is not read as mathematics."""
    from matplotlib import ticker

    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    if decades < 0.7:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
    else:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=9))
    near = low > 3e-4 and high < 3e5
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if near or decades < 2.5 else _power(value))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _power(value: float) -> str:
    raised = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
    return "10" + str(round(math.log10(value))).translate(raised) if value > 0 else ""


def _log_places(axes: Axes, variant: Variant) -> None:
    axes.set_xscale("log", base=2)
    places = sorted({float(x) for series in variant.series for x in series.x})
    if len(places) < 10 and all(b / a > 1.3 for a, b in pairwise(places)):
        axes.set_xticks(places, [f"{x:g}" for x in places])
    else:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _whiskers(series: Series) -> list[list[float]]:
    below = [max(0.0, y - low) for y, low in zip(series.y, series.low, strict=True)]
    above = [max(0.0, high - y) for y, high in zip(series.y, series.high, strict=True)]
    return [below, above]


def _cut(text: str, most: int = 40) -> str:
    """Short enough to draw, without what a font cannot draw."""
    shown = "".join(character if character.isprintable() else "�" for character in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
