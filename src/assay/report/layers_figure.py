"""Where in the model the weights part: a row for each layer, a column for each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from assay.report.charts import Chart, Series, Variant
from assay.report.estimates import estimate_size
from assay.report.pair_summary import FLASH, NULL
from assay.report.training_rows import described, series_of, studies, whole
from assay.results.record import Record

_LAST = ("last", "head", "norm", "final")
_Sums = dict[tuple[str, int, int], list[float]]
"""(layer, step, seed) → sums over its tensors of count times the squares of difference and spread."""


def layers_figure(rows: Sequence[Record]) -> Chart | None:
    """The relative deviation of every layer's weights, a variant for each pair: flash first."""
    found = studies([row for row in rows if row["kind"] == "weights" and row["pair"] not in (None, NULL)])
    variants = []
    for name, group in found.items():
        kept = [row for row in whole(group)[0] if row["layer"]]
        pairs = sorted(dict.fromkeys(row["pair"] for row in kept), key=lambda pair: pair != FLASH)
        for pair in pairs:
            where = (("training", name),) if len(found) > 1 else ()
            drawn = [row for row in kept if row["pair"] == pair]
            variants.append(_variant((*where, ("pair", pair)), drawn))
    if not variants:
        return None
    return Chart(
        anchor="layers",
        title="Where the weights part",
        caption="Root mean square difference of the weights over their own spread (standard deviation), layer by layer "
        "over training.",
        x_title="step",
        y_title="RMS difference / standard deviation",
        kind="heat",
        variants=tuple(variants),
    )


def layer_of(name: str) -> str:
    """The part of a model that a tensor belongs to: "blocks.0.mlp.down.weight" → "block 0, mlp"."""
    parts = [part for part in name.split(".") if part not in ("weight", "bias")]
    if len(parts) > 1 and parts[0] == "blocks":
        return ", ".join([f"block {parts[1]}", *parts[2:3]]).replace("_", " ")
    return (parts or [name])[0].replace("_", " ")


def _place(layer: str) -> tuple[int, int, str]:
    """In the order of the model: what comes before the blocks, the blocks, what comes after."""
    if layer.startswith("block "):
        number = layer.removeprefix("block ").partition(",")[0]
        return 1, int(number) if number.isdecimal() else 0, layer
    return 2 if layer.startswith(_LAST) else 0, 0, layer


def _variant(choices: tuple[tuple[str, str], ...], rows: Sequence[Record]) -> Variant:
    sums: _Sums = {}
    for row in rows:
        found = sums.setdefault((layer_of(row["layer"]), row["step"], row["seed"]), [0.0, 0.0])
        found[0] += row["count"] * row["rmse"] ** 2
        found[1] += row["count"] * row["std"] ** 2
    cells: dict[str, dict[int, list[float]]] = {}
    for (layer, step, _), (difference, spread) in sums.items():
        cells.setdefault(layer, {}).setdefault(step, []).append(_over(difference, spread))
    series = [_series(layer, cells[layer]) for layer in sorted(cells, key=_place)]
    missing = [each.name for each in series if len(each.x) < len(cells[each.name])]
    notes = (
        [f"Not all drawn, for want of seeds, of spread or of finite values: {'; '.join(missing)}."] if missing else []
    )
    if any(0 in each.y for each in series):
        notes.append("Where there is no colour on the log scale the difference is exactly 0.")
    return Variant(
        choices=choices,
        series=tuple(each for each in series if each.x),
        setting=described(rows),
        notes=tuple(notes),
    )


def _series(layer: str, found: dict[int, list[float]]) -> Series:
    points = [(step, at) for step, values in sorted(found.items()) if (at := estimate_size(values)) is not None]
    return series_of(layer, points)


def _over(difference: float, spread: float) -> float:
    return math.sqrt(difference / spread) if spread > 0 else (0.0 if difference == 0 else math.inf)
