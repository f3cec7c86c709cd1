"""What a claim is: the paper's words and figure, ours, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from assay.report.judgement import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One claim of the paper and what our records say about it."""

    number: str
    """C1 … C10, or "null"."""
    figure: str
    """The paper's, e.g. "Fig 4"."""
    text: str
    """What the paper says, in a sentence."""
    paper: str
    """The paper's figure, e.g. "about 10×"."""
    ours: tuple[str, ...]
    """Ours, with intervals: one or several lines."""
    verdict: Verdict
    because: str
    """What decides it; for "holds only when …", when."""
    anchor: str
    """The id of the chart in the page that shows it; "" where there is none."""
