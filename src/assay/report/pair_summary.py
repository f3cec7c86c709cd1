"""What a study of pairs says, in a table and in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from assay.report.estimates import Estimate
from assay.report.summary import Table
from assay.report.trajectories import Trajectory, ratio, slope_ratio, trajectories
from assay.results.record import Record

FLASH = "flash"
FLASH_IN_FP16 = "flash in FP16"
INITIALISATION = "other initialisation"
LOW_PRECISION = ("FP16 ↔ FP32", "BF16 ↔ FP32")
NULL = "null"


def pair_table(rows: Sequence[Record]) -> Table:
    """A line for each pair: where its weights ended."""
    w1, most, relative = (trajectories(rows, figure) for figure in ("w1", "max", "relative_rmse"))
    lines = []
    for name, found in w1.items():
        step = found.steps[-1] if found.steps else 0
        lines.append(
            (
                name,
                str(step),
                str(len(found.curves)),
                _text(found.last),
                _text(found.slope),
                _text(most[name].last),
                _text(relative[name].last),
            )
        )
    columns = ("pair", "step", "seeds", "W1", "W1 a step", "max", "RMS / spread")
    return Table("Weights at the end: geometric mean over the seeds [95%]", columns, tuple(lines), 1)


def verdicts(rows: Sequence[Record]) -> list[str]:
    """A sentence for each arm: how fast and how far, against another initialisation and low precision."""
    found = trajectories(rows, "w1")
    return [_verdict(found, name) for name in found if name not in (NULL, INITIALISATION, *LOW_PRECISION)]


def _verdict(found: dict[str, Trajectory], name: str) -> str:
    arm, parts = found[name], []
    other = found.get(INITIALISATION)
    if other is not None:
        parts.append(_against(slope_ratio(arm, other), "its weights drift", "as another initialisation's"))
        parts.append(_against(ratio(arm, other), "it moves the weights", "as another initialisation does"))
    for low in LOW_PRECISION:
        if low in found:
            parts.append(_against(slope_ratio(arm, found[low]), "its weights drift", f"as those of {low}"))
            parts.append(_against(ratio(arm, found[low]), "it moves the weights", f"as {low} does"))
    return f"{name}: {'; '.join(parts)}." if parts else f"{name}: nothing to compare it with was measured."


def _against(found: Estimate | None, what: str, whom: str) -> str:
    if found is None:
        return f"whether {what} as much {whom} cannot be said"
    amount = f"{found.value:.2g}× [{found.low:.2g}, {found.high:.2g}] as much"
    if found.high < 1:
        return f"{what} less, {amount} {whom}"
    if found.low > 1:
        return f"{what} more, {amount} {whom}"
    return f"{what} {amount} {whom}: no clear difference"


def nulls(rows: Sequence[Record]) -> list[Record]:
    """Rows of pairs that differ in nothing, whatever their name, and are not exactly 0."""
    return [row for row in rows if (row["pair"] == NULL or row["changed"] == "") and row["max"] != 0]


def _text(found: Estimate | None) -> str:
    return "–" if found is None else f"{found.value:.2g} [{found.low:.2g}, {found.high:.2g}]"
