"""The paper's Figures 7 and 8 and how the trainings went: curves over the steps, with bands over the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from assay.report.charts import Chart, Series, Variant
from assay.report.estimates import estimate_size
from assay.report.pair_summary import FLASH, FLASH_IN_FP16, INITIALISATION, NULL
from assay.report.palette import LIGHT
from assay.report.training_rows import described, runs, series_of, studies, whole
from assay.report.trajectories import Curve, Trajectory, trajectories
from assay.results.record import Record

MOST = 60
"""Points of a curve; where there are more steps, a point is the mean of some that follow each other."""
KINDS = ("weights", "gradients", "optimizer", "activations")
Curves = Mapping[str, Trajectory]
_OVER_FLASH = (
    ("FP16 ↔ FP32", FLASH_IN_FP16),
    ("BF16 ↔ FP32", FLASH),
    ("FP8 ↔ BF16", FLASH),
    ("other order", FLASH),
    (INITIALISATION, FLASH),
)
"""Whom to hold against flash in the same format."""
_BEGUN = "Without step 1, where hardly anything has moved."


@dataclass(frozen=True)
class _Gaps:
    """Steps at which a curve has no point, by series."""

    zero: dict[str, list[int]]
    alone: dict[str, list[int]]
    other: dict[str, list[int]]

    def notes(self, curves: Curves, log: bool) -> tuple[str, ...]:
        told = [
            ("Not drawn, because a value is not finite", self.other),
            ("Not drawn, because one seed gives no interval", self.alone),
            *([("Exactly 0, which a log axis cannot show", self.zero)] if log else []),
        ]
        return tuple(
            f"{words}: {'; '.join(_where(name, steps, curves[name]) for name, steps in found.items())}."
            for words, found in told
            if found
        )


def figure_7(rows: Sequence[Record]) -> Chart | None:
    """W1 and the largest difference of the weights, flash against standard attention."""

    def curves(group: list[Record]) -> Curves:
        found = {"W1": trajectories(group, "w1"), "max": trajectories(group, "max")}
        return {name: _begun(pairs[FLASH]) for name, pairs in found.items() if FLASH in pairs}

    return _chart(
        anchor="figure-7",
        title="Figure 7: the weights, flash against baseline, over training",
        caption="Wasserstein distance (W1) and largest difference between the weights of the same training under "
        f"flash and under standard attention. The paper sees both grow. {_BEGUN}",
        y_title="difference of the weights",
        variants=_variants(rows, curves),
    )


def figure_8(rows: Sequence[Record]) -> Chart | None:
    """The relative W1 of every pair."""

    def of(kind: str) -> Callable[[list[Record]], Curves]:
        return lambda group: {
            name: _begun(found) for name, found in trajectories(group, "relative_w1", kind).items() if name != NULL
        }

    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    made = [
        _with(variant, ("compared", kind)) if len(kinds) > 1 else variant
        for kind in kinds
        for variant in _variants(rows, of(kind))
    ]
    return _chart(
        anchor="figure-8",
        title="Figure 8: every pair, over training",
        caption="Wasserstein distance between the two trainings of each pair, over the spread of the reference's own "
        f"values. The paper compares slopes: flash against another initialisation and against low precision. {_BEGUN}",
        y_title="W1 / standard deviation",
        variants=made,
    )


def ratio_figure(rows: Sequence[Record]) -> Chart | None:
    """W1 of low precision and of other seeds over that of flash."""

    def curves(group: list[Record]) -> Curves:
        found = {name: _begun(t) for name, t in trajectories(group, "w1").items()}
        return {
            f"{one} / {other}": _over(found[one], found[other])
            for one, other in _OVER_FLASH
            if one in found and other in found
        }

    return _chart(
        anchor="over-flash",
        title="Low precision and other seeds over flash",
        caption="How many times as far (W1) they move the weights as flash does against standard attention in the same "
        "format. The paper has 2 to 5 for FP16.",
        y_title="W1 / W1 of flash",
        variants=_variants(rows, curves),
    )


def loss_figure(rows: Sequence[Record]) -> Chart | None:
    """The loss of every training."""
    most = max((row["step"] for row in rows if row["kind"] == "run"), default=0)
    width = math.ceil(most / MOST)
    each = "" if width <= 1 else f" Each point is the mean of {width} steps."
    return _chart(
        anchor="loss",
        title="The loss of every training",
        caption=f"On the batches that are trained on.{each}",
        y_title="loss",
        y_log=False,
        variants=_variants(rows, lambda group: _thinned(runs(group, "loss"), width), log=False),
    )


def held_out_figure(rows: Sequence[Record]) -> Chart | None:
    """The loss on data that is not trained on."""
    return _chart(
        anchor="held-out",
        title="The loss on data that is held out",
        caption="On a batch that no training sees, always the same one.",
        y_title="held-out loss",
        y_log=False,
        variants=_variants(rows, lambda group: runs(group, "held_out"), log=False),
    )


def scale_figure(rows: Sequence[Record]) -> Chart | None:
    """The loss scale of those who have one."""
    return _chart(
        anchor="loss-scale",
        title="The loss scale",
        caption="What the loss is multiplied by before the backward pass, so that small FP16 gradients do not vanish. "
        "It falls when a gradient overflows.",
        y_title="loss scale",
        variants=_variants(rows, _scales),
    )


def skipped_figure(rows: Sequence[Record]) -> Chart | None:
    """The steps that were skipped."""
    return _chart(
        anchor="skipped",
        title="Steps skipped so far",
        caption="A step whose gradients overflow is left out. An FP32 training that leaves out the same steps tells "
        "their part from that of rounding. Trainings that are not shown skipped none.",
        y_title="skipped steps",
        y_log=False,
        variants=_variants(rows, _skipped, log=False),
    )


def _chart(
    *, anchor: str, title: str, caption: str, y_title: str, variants: Sequence[Variant], y_log: bool = True
) -> Chart | None:
    if not variants:
        return None
    return Chart(
        anchor=anchor,
        title=title,
        caption=caption,
        x_title="step",
        y_title=y_title,
        kind="line",
        band=True,
        y_log=y_log,
        variants=tuple(variants),
    )


def _variants(rows: Sequence[Record], curves: Callable[[list[Record]], Curves], log: bool = True) -> list[Variant]:
    """One for each study that has such curves."""
    found = studies(rows)
    made = []
    for name, group in found.items():
        kept, short = whole(group)
        drawn = curves(kept)
        if drawn:
            gaps = _Gaps({}, {}, {})
            series = tuple(_series(i, label, t, gaps) for i, (label, t) in enumerate(drawn.items()))
            left = (f"Left out, since it ended early: {'; '.join(short)}.",) if short else ()
            made.append(
                Variant(
                    choices=(("training", name),) if len(found) > 1 else (),
                    series=tuple(each for each in series if each.x),
                    setting=described(group),
                    notes=(*left, *gaps.notes(drawn, log)),
                )
            )
    return made


def _series(index: int, name: str, found: Trajectory, gaps: _Gaps) -> Series:
    points = []
    for step in sorted(set().union(*found.curves.values())):
        values = [curve[step] for curve in found.curves.values() if step in curve]
        at = estimate_size(values)
        if at is not None:
            points.append((step, at))
            if at.value == 0:
                gaps.zero.setdefault(name, []).append(step)
        else:
            alone = len(values) == 1 and math.isfinite(values[0])
            (gaps.alone if alone else gaps.other).setdefault(name, []).append(step)
    return series_of(name, points, colour=index % len(LIGHT), dash=index // len(LIGHT))


def _where(name: str, steps: Sequence[int], found: Trajectory) -> str:
    if len(steps) == len(set().union(*found.curves.values())):
        return f"{name} at every step"
    listed = ", ".join(map(str, steps[:6])) + (f" and {len(steps) - 6} more" if len(steps) > 6 else "")
    return f"{name} at step {listed}" if len(steps) == 1 else f"{name} at steps {listed}"


def _over(one: Trajectory, other: Trajectory) -> Trajectory:
    """Seed by seed, where both were compared and the other is not 0."""
    curves = {
        seed: {step: value / below for step, value in one.curves[seed].items() if (below := curve.get(step, 0.0)) > 0}
        for seed, curve in other.curves.items()
        if seed in one.curves
    }
    return Trajectory(one.pair, curves)


def _begun(found: Trajectory) -> Trajectory:
    """Without the first step, many decades below the others, if enough are left."""
    if len(found.steps) < 3 or found.steps[0] != 1:
        return found
    return Trajectory(found.pair, {seed: {s: v for s, v in c.items() if s != 1} for seed, c in found.curves.items()})


def _thinned(found: Curves, width: int) -> Curves:
    return {
        name: Trajectory(name, {seed: _means(curve, width) for seed, curve in t.curves.items()})
        for name, t in found.items()
    }


def _means(curve: Curve, width: int) -> Curve:
    """Means of `width` steps that follow each other, each at its last step."""
    if width <= 1:
        return curve
    bins: dict[int, list[float]] = {}
    for step, value in sorted(curve.items()):
        bins.setdefault(math.ceil(step / width), []).append(value)
    return {place * width: math.fsum(values) / len(values) for place, values in bins.items()}


def _scales(rows: Sequence[Record]) -> Curves:
    """Of those whose loss is scaled."""
    return {name: t for name, t in runs(rows, "scale").items() if _ever(t, lambda scale: scale != 1)}


def _skipped(rows: Sequence[Record]) -> Curves:
    """Of those that are scaled or skipped a step."""
    scaled = _scales(rows)
    found = runs(rows, "skipped").items()
    return {name: t for name, t in found if name in scaled or _ever(t, lambda count: count > 0)}


def _ever(found: Trajectory, wanted: Callable[[float], bool]) -> bool:
    return any(wanted(value) for curve in found.curves.values() for value in curve.values())


def _with(variant: Variant, choice: tuple[str, str]) -> Variant:
    return Variant(
        choices=(*variant.choices, choice), series=variant.series, setting=variant.setting, notes=variant.notes
    )
