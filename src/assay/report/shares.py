"""Attributions in words and as a chart: which step owns how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from assay.report.attribution import Attribution, StepShare
from assay.report.charts import Chart, Series, Variant
from assay.report.estimates import Estimate
from assay.report.steps import explain

MEASURES: dict[str, tuple[str, Callable[[StepShare], Estimate]]] = {
    "owns": ("its share when the error is divided up between all steps; the shares add up to 100%", lambda s: s.owns),
    "alone": ("the error with only this step in low precision", lambda s: s.alone),
    "saves": ("what goes when only this step is raised; below 0, that alone makes things worse", lambda s: s.saves),
}
"""Name → what it means, and where it is."""


def percent(share: Estimate) -> str:
    """A share with its interval: "61% [57, 66]"."""
    value, low, high = map(whole, share[:3])
    return f"{value}% [{low}, {high}]"


def whole(share: float) -> str:
    """A share in whole percent, without the sign of percent."""
    return f"{round(100 * share)}".replace("-", "−")


def headline(found: Attribution) -> tuple[str, str, str]:
    """The finding in one sentence, in three pieces: the setting, the first owner, the others."""
    start = f"In {found.format} with {found.inputs} inputs at length {found.length}, "
    if not found.steps:
        return start, "no step was measured", "."
    first, *others = found.steps
    verb = "own" if explain(first.step).label.split()[0].endswith("s") else "owns"
    lead = f"{_called(first)} {verb} {percent(first.owns)} of the mean square error"
    named = [step for step in others if step.owns.value >= 0.05][:3]
    told = "".join(f"; {_called(step)} {percent(step.owns)}" for step in named)
    return start, lead, f"{told}."


def _called(share: StepShare) -> str:
    label = explain(share.step).label
    return f"the {label[0].lower()}{label[1:]}" if label[1:2].islower() else label


def attribution_figure(attributions: Sequence[Attribution]) -> Chart | None:
    """Horizontal bars per step, a variant for each attribution."""
    if not attributions:
        return None
    return Chart(
        anchor="attribution",
        title="Which step owns the deviation",
        caption="Share of the mean square error against golden of the plan with all steps low, by step. "
        + " ".join(f"{name.capitalize()}: {words}." for name, (words, _) in MEASURES.items()),
        x_title="step",
        y_title="share of the mean square error",
        kind="hbar",
        y_log=False,
        reference=0.0,
        variants=tuple(_variant(found) for found in attributions),
    )


def _variant(found: Attribution) -> Variant:
    series = []
    for colour, (name, (_, get)) in enumerate(MEASURES.items()):
        shares = [get(step) for step in found.steps]
        series.append(
            Series(
                name=name,
                x=tuple(explain(step.step).label for step in found.steps),
                y=tuple(share.value for share in shares),
                low=tuple(share.low for share in shares),
                high=tuple(share.high for share in shares),
                seeds=tuple(share.seeds for share in shares),
                colour=colour,
            )
        )
    return Variant(
        choices=(("inputs", found.inputs), ("format", found.format), ("length", str(found.length))),
        series=tuple(series),
        setting=setting(found),
        notes=("".join(headline(found)),),
    )


def setting(found: Attribution) -> str:
    """What was measured, and how large the whole is."""
    return (
        f"{found.setting}. From {found.low} (RMS error {found.low_rmse}) to {found.high} (RMS error {found.high_rmse})"
    )
