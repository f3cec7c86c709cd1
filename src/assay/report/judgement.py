"""Yes, no or undecided: from intervals to a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from assay.report.estimates import Estimate
from assay.results.record import Record

Verdict = Literal["holds", "holds only when …", "does not hold", "undecided", "not measured here"]
Outcome = bool | None
"""Yes, no, or undecided."""

FLAT = 0.05
"""A slope, log against log, that counts as none: 16 times the area move the deviation by 15%."""


class Judgement(TypedDict):
    """Two fields of a claim."""

    verdict: Verdict
    because: str


def within(found: Estimate, bounds: tuple[float, float]) -> Outcome:
    """Whether the interval lies inside the bounds (yes), outside of them (no), or across."""
    if bounds[0] <= found.low and found.high <= bounds[1]:
        return True
    return False if found.high < bounds[0] or found.low > bounds[1] else None


def is_flat(slope: Estimate) -> bool:
    """Whether the interval of a slope lies within `FLAT` of 0."""
    return slope.low >= -FLAT and slope.high <= FLAT


def times(found: Estimate) -> str:
    """ "9.5× [9.1, 9.9]"."""
    return f"{found.value:.3g}× [{found.low:.3g}, {found.high:.3g}]"


def power(found: Estimate) -> str:
    """An exponent with its interval, signs written."""
    return f"{found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def share(found: Estimate) -> str:
    """A share in percent with its interval."""
    return f"{found.value:.0%} [{100 * found.low:.0f}, {100 * found.high:.0f}]"


def judged(outcomes: dict[str, Outcome], test: str, rows: Sequence[Record], sweep: str) -> Judgement:
    """`verdict` and `because` of a claim that is tested once for each setting."""
    if not rows:
        return {"verdict": "not measured here", "because": f"No records: assay sweep {sweep}."}
    if not outcomes:
        because = "The records have too few seeds for an interval, or lack the plan `uniform` or the baseline `eager`."
        return {"verdict": "undecided", "because": f"{because} assay sweep {sweep} has all."}
    found = set(outcomes.values())
    verdict: Verdict = "undecided"
    if found == {True}:
        verdict = "holds"
    elif True in found:
        verdict = "holds only when …"
    elif False in found:
        verdict = "does not hold"
    told = [("For", True), ("Not for", False), ("Undecided for", None)]
    parts = [f"{words} {_names(outcomes, wanted)}." for words, wanted in told if wanted in found and len(found) > 1]
    return {"verdict": verdict, "because": " ".join([*parts, f"Tested: {test}."])}


def _names(outcomes: dict[str, Outcome], wanted: Outcome) -> str:
    """Settings, those that begin alike together: "uniform, bf16" and "uniform, fp16" are "uniform, bf16 | fp16"."""
    ends: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if outcome is wanted:
            first, _, last = name.rpartition(", ")
            ends.setdefault(first, []).append(last)
    return "; ".join(f"{first}{', ' if first else ''}{' | '.join(last)}" for first, last in ends.items())
