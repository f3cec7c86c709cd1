"""The report's part about a watched model: layers over steps, heads of layers, the worst calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from assay.report.charts import Chart, Series, Variant
from assay.report.figures import Section
from assay.report.summary import Table
from assay.report.training_section import Extra, Part
from assay.results.record import Record
from assay.results.watched import Compared, badness, compared, head_cell, place, place_of_nonfinite, why_over

WORST = 12
"""Calls in the table."""
WATCHED = Section(
    "watch",
    "Watched models",
    "Attention calls of a running model, each beside the same computed plainly in its format: is it normal?",
    "",
    (),
)
_COLUMNS = (
    "layer", "step", "tensor", "error / baseline's", "worst head", "largest error", "difference", "NaN or inf",
    "scores", "entropy", "tied rows",
)  # fmt: skip


def watch_parts(rows: Sequence[Record]) -> list[Part]:
    """The section, where there is something to say."""
    if not rows:
        return []
    charts = tuple(filter(None, (steps_figure(rows), heads_figure(rows))))
    return [(WATCHED, charts, Extra(tuple(findings(rows)), (worst_calls(rows),)))]


def findings(rows: Sequence[Record]) -> list[str]:
    """A sentence for each watch, and one where it met NaN or infinities."""
    told = []
    for name, group in _watches(rows).items():
        tensors = sorted(compared(group), key=lambda one: (one.whole["step"], one.whole["time"]))
        bad = [one.whole for one in tensors if one.nonfinite]
        if bad:
            first = place_of_nonfinite(bad[0])
            told.append(f"{name}: NaN or infinity in {len(bad)} of {len(tensors)} tensors, first in {first}.")
        told.append(f"{name}: {_judgement(tensors, bool(bad))}.")
    return told


def _judgement(tensors: Sequence[Compared], nonfinite: bool) -> str:
    over = [found for found in (one.over for one in tensors) if found is not None]
    judged = [one for one in tensors if one.whole["over"] is not None]
    if not judged:
        return f"{len(tensors)} tensors compared, not judged: golden was not computed"
    if over:
        return f"{len(over)} of {len(judged)} tensors over budget, first {place(over[0])}, {why_over(over[0])}"
    whole = max(one.whole["ratio_rmse"] for one in judged)
    head = max(one.worst["ratio_rmse"] for one in judged)
    what = "all else" if nonfinite else f"all {len(judged)} tensors"
    return f"{what} within budget, at worst {whole:.2g} times the plain error ({head:.2g} in one head)"


def worst_calls(rows: Sequence[Record]) -> Table:
    """Those with the largest error over the baseline's, as a whole or in one head; or difference where that is all."""
    found = sorted(compared(rows), key=lambda one: badness(one.worst), reverse=True)[:WORST]
    return Table("The worst calls", _COLUMNS, tuple(map(_line, found)), 3)


def steps_figure(rows: Sequence[Record]) -> Chart | None:
    """Layers over steps."""
    whole = [row for row in rows if row["head"] is None]
    return _heat(
        whole,
        lambda row: float(row["step"]),
        anchor="watch-steps",
        title="Where and when: error over the baseline's",
        caption="Root mean square error of the call against FP64, over that of plain attention in the same format on "
        "the same inputs; the worst call of a step. 1 is as good as plain.",
        x_title="step",
    )


def heads_figure(rows: Sequence[Record]) -> Chart | None:
    """Layers over heads."""
    return _heat(
        [row for row in rows if row["head"] is not None],
        lambda row: float(row["head"]),
        anchor="watch-heads",
        title="Which head: error over the baseline's",
        caption="The same, head by head; the worst of all steps.",
        x_title="head",
    )


def _heat(
    rows: Sequence[Record], place: Callable[[Record], float], *, anchor: str, title: str, caption: str, x_title: str
) -> Chart | None:
    variants = []
    groups = _watches([row for row in rows if row["ratio_rmse"] is not None])
    for name, group in groups.items():
        for tensor in dict.fromkeys(row["tensor"] for row in group):
            kept = [row for row in group if row["tensor"] == tensor]
            where = (("watch", name),) if len(groups) > 1 else ()
            series = tuple(_series(layer, kept, place) for layer in dict.fromkeys(row["layer"] for row in kept))
            variants.append(Variant(choices=(*where, ("tensor", tensor)), series=series, setting=_setting(kept[0])))
    if not variants:
        return None
    return Chart(
        anchor=anchor, title=title, caption=caption, x_title=x_title, y_title="error / baseline's", kind="heat",
        variants=tuple(variants),
    )  # fmt: skip


def _series(layer: str, rows: Sequence[Record], place: Callable[[Record], float]) -> Series:
    cells: dict[float, float] = {}
    counts: dict[float, int] = {}
    for row in rows:
        if row["layer"] == layer:
            x = place(row)
            cells[x] = max(cells.get(x, 0.0), row["ratio_rmse"])
            counts[x] = counts.get(x, 0) + 1
    at = tuple(sorted(cells))
    values = tuple(cells[x] for x in at)
    return Series(
        name=layer or "(the model)", x=at, y=values, low=values, high=values, seeds=tuple(counts[x] for x in at)
    )


def _watches(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """By watch, named by its model; numbered where a model was watched several times."""
    groups: dict[str, list[Record]] = {}
    for row in rows:
        groups.setdefault(row["watch"], []).append(row)
    models = [group[0]["model"] for group in groups.values()]
    return {
        group[0]["model"] if models.count(group[0]["model"]) == 1 else f"{group[0]['model']} {number}": group
        for number, group in enumerate(groups.values(), 1)
    }


def _setting(row: Record) -> str:
    shape = (row["batch"], row["heads"], row["queries"], row["keys"], row["dim"])
    at = "" if None in shape else ", batch {}, {} heads, {} queries, {} keys, D {}".format(*shape)
    return f"{row['implementation']} against {row['against']}, {row['format']}, {row['device']}{at}"


def _line(one: Compared) -> tuple[str, ...]:
    row = one.whole

    def number(name: str, form: str = ".2g") -> str:
        return "–" if row[name] is None else format(row[name], form)

    scores = "–" if row["logit_min"] is None else f"{row['logit_min']:.3g} to {row['logit_max']:.3g}"
    return (
        row["layer"] or "(the model)", str(row["step"]), row["tensor"], number("ratio_rmse"), head_cell([one]),
        number("error_max"), number("difference_max"), number("actual_nonfinite", ",.0f"), scores, number("entropy"),
        number("tied", ".1%"),
    )  # fmt: skip
