"""A figure whose values are colours, by Matplotlib: a row for each series, a column for each place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assay.report.charts import Chart, Variant
from assay.report.palette import HEAT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_heat(figure: Figure, axes: Axes, chart: Chart, variant: Variant) -> None:
    """Draw the variant with a colour bar; what has no value stays white."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    places = sorted({float(x) for series in variant.series for x in series.x})
    cells = [dict(zip(map(float, series.x), series.y, strict=True)) for series in variant.series]
    shown = [y for row in cells for y in row.values() if y > 0 or not chart.y_log]
    if not shown:
        axes.set_axis_off()
        return
    low, high = min(shown), max(shown)
    if low == high:
        low, high = low / 2, high * 2
    image = axes.imshow(
        [[_value(row.get(x), chart.y_log) for x in places] for row in cells],
        aspect="auto",
        interpolation="nearest",
        cmap=LinearSegmentedColormap.from_list("heat", list(zip((0.0, 0.6, 1.0), HEAT, strict=True))),
        norm=LogNorm(low, high) if chart.y_log else Normalize(low, high),
    )
    axes.set_yticks(range(len(cells)), [series.name[:28] for series in variant.series], fontsize=7)
    every = math.ceil(len(places) / 14)
    axes.set_xticks(range(0, len(places), every), [f"{x:g}" for x in places[::every]])
    axes.set_xlabel(chart.x_title)
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, label=chart.y_title, format=lambda value, _: f"{value:.0e}")
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def _value(found: float | None, log: bool) -> float:
    return math.nan if found is None or (log and found <= 0) else found
