"""From records to the variants of a chart: groups them by place, estimates over seeds, says what is not drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from assay.report.charts import Series, Variant
from assay.report.choices import COLUMNS, describe, free_columns, latest, rank
from assay.report.estimates import Estimate, estimate_size
from assay.results.record import Record

Measure = Callable[[Record], float | None]
FORMATS = ("fp8_e5m2", "fp8_e4m3", "bf16", "fp16", "tf32", "fp32", "fp64")
"""They have the same colour in all charts."""


class Sketch(NamedTuple):
    """Where a record goes in a figure."""

    x: str
    """Column of `choices.COLUMNS`, or "area" for that of the block."""
    measures: Mapping[str, Measure]
    """Name → value of a record: a series each. A single one is not named."""
    series: tuple[str, ...] = ()
    """Columns that make series: colour by the first, dash by the second."""
    aside: tuple[str, Measure] | None = None
    """A further measure to tell at every x, not drawn."""
    implied: tuple[str, ...] = ()
    """Columns that are no choice, because another column says the same."""


class _Gaps(NamedTuple):
    """Points that the drawing does not show."""

    overflowed: list[str]
    alone: list[str]
    zero: list[str]

    def notes(self) -> tuple[str, ...]:
        told = {
            "Not drawn, because a value is not finite (overflow, or a division by 0): ": self.overflowed,
            "Not drawn, because one seed gives no interval: ": self.alone,
            "Exactly 0, which a log axis cannot show: ": self.zero,
        }
        return tuple(f"{text}{'; '.join(points)}." for text, points in told.items() if points)


def column(name: str) -> Measure:
    """The measure that a column holds."""
    return lambda row: row[name]


def ratio(over: str, under: str) -> Measure:
    """One column over another, seed by seed; not finite where the lower one is 0."""

    def value(row: Record) -> float | None:
        above, below = row[over], row[under]
        if above is None or below is None:
            return None
        if below == 0:
            return math.inf if above > 0 else math.nan
        return float(above / below)

    return value


def variants(rows: Sequence[Record], sketch: Sketch) -> tuple[Variant, ...]:
    """The variants of a chart, the one to show first in front."""
    rows = latest(rows)
    axes = (*sketch.series, *sketch.implied, *(("block", "block shape") if sketch.x == "area" else (sketch.x,)))
    free = free_columns(rows, lambda row: (_place(row, sketch.x), _names(row, sketch)), axes)
    orders = [_order(name, {_word(COLUMNS[name](row)) for row in rows}, i == 0) for i, name in enumerate(sketch.series)]

    groups: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(_word(COLUMNS[name](row)) for name in free), []).append(row)
    made = []
    for values in sorted(groups, key=lambda values: [rank(*pair) for pair in zip(free, values, strict=True)]):
        gaps = _Gaps([], [], [])
        series = _all_series(groups[values], sketch, orders, gaps)
        aside = (_tell(sketch.aside[0], groups[values], sketch),) if sketch.aside else ()
        made.append(
            Variant(
                choices=tuple(zip(free, values, strict=True)),
                series=series,
                setting=describe(groups[values], (*axes, *free)),
                notes=(*filter(None, aside), *gaps.notes()),
            )
        )
    return tuple(made)


def categories(rows: Sequence[Record], x: str) -> tuple[str, ...]:
    """The places of an axis of words, in order."""
    return tuple(sorted({_word(COLUMNS[x](row)) for row in rows}, key=lambda value: rank(x, value)))


def _all_series(
    rows: Sequence[Record], sketch: Sketch, orders: Sequence[Mapping[str, int]], gaps: _Gaps
) -> tuple[Series, ...]:
    groups: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(_names(row, sketch), []).append(row)
    made = []
    for names in groups:
        style = [order[name] for order, name in zip(orders, names, strict=True)]
        for index, (label, measure) in enumerate(sketch.measures.items()):
            title = ", ".join(names if len(sketch.measures) == 1 else (*names, label))
            colour, dash = (*style, index, 0)[:2]
            made.append(_series(title, groups[names], sketch, measure, (colour, dash), gaps))
    return tuple(sorted((series for series in made if series.x), key=lambda series: (series.colour, series.dash)))


def _series(
    title: str, rows: Sequence[Record], sketch: Sketch, measure: Measure, style: tuple[int, int], gaps: _Gaps
) -> Series:
    points: list[tuple[str | float, Estimate, str]] = []
    aside = _estimates(rows, sketch.x, sketch.aside[1]) if sketch.aside else {}
    for x, found in _estimates(rows, sketch.x, measure).items():
        where = f"{title} at {_say(x)}" if title else _say(x)
        if isinstance(found, Estimate):
            told = aside.get(x)
            extra = f"{sketch.aside[0]}: {told}" if sketch.aside and isinstance(told, Estimate) else ""
            points.append((x, found, extra))
            if found.value == 0:
                gaps.zero.append(where)
        elif found == 1:
            gaps.alone.append(where)
        else:
            gaps.overflowed.append(where)
    return Series(
        name=title,
        x=tuple(x for x, _, _ in points),
        y=tuple(found.value for _, found, _ in points),
        low=tuple(found.low for _, found, _ in points),
        high=tuple(found.high for _, found, _ in points),
        seeds=tuple(found.seeds for _, found, _ in points),
        extra=tuple(extra for _, _, extra in points) if any(extra for _, _, extra in points) else (),
        colour=style[0],
        dash=style[1],
    )


def _estimates(rows: Sequence[Record], x: str, measure: Measure) -> dict[str | float, Estimate | int]:
    """Per x, in order: the estimate, or the number of values that gave none."""
    values: dict[str | float, list[float]] = {}
    for row in rows:
        value = measure(row)
        if value is not None:
            values.setdefault(_place(row, x), []).append(value)
    ordered = sorted(values, key=lambda at: rank(x, at) if isinstance(at, str) else (at,))
    return {at: estimate_size(values[at]) or _count(values[at]) for at in ordered}


def _count(values: Sequence[float]) -> int:
    return 1 if len(values) == 1 and math.isfinite(values[0]) else -1


def _tell(label: str, rows: Sequence[Record], sketch: Sketch) -> str:
    assert sketch.aside is not None
    found = _estimates(rows, sketch.x, sketch.aside[1]).items()
    told = [f"{_say(x)} {each}" for x, each in found if isinstance(each, Estimate)]
    return f"{label}: {'; '.join(told)}." if told else ""


def _place(row: Record, x: str) -> str | float:
    if x == "area":
        return float(row["block_rows"] * row["block_columns"])
    value = COLUMNS[x](row)
    return float(value) if x == "length" else _word(value)


def _names(row: Record, sketch: Sketch) -> tuple[str, ...]:
    return tuple(_word(COLUMNS[name](row)) for name in sketch.series)


def _order(name: str, values: set[str], colours: bool) -> dict[str, int]:
    """Value → index of its colour or dash: the same in all variants, and for a format's colour in all charts."""
    ordered = sorted(values, key=lambda value: rank(name, value))
    if name == "format" and colours:
        ordered = [*FORMATS, *(value for value in ordered if value not in FORMATS)]
    return {value: index for index, value in enumerate(ordered)}


def _word(value: Any) -> str:
    return "none" if value in (None, "") else str(value)


def _say(x: str | float) -> str:
    return x if isinstance(x, str) else f"{x:g}"
