"""What a report says, before it is written as a page or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.report.attribution import Attribution
from assay.report.charts import Chart
from assay.report.claims import Claim
from assay.report.figures import SECTIONS, Section
from assay.report.provenance import Provenance, provenance
from assay.results.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Claims, attributions and figures, in the order in which they are told."""

    asked: str
    verdict: str
    claims: tuple[Claim, ...]
    attributions: tuple[Attribution, ...]
    sections: tuple[tuple[Section, tuple[Chart, ...]], ...]
    missing: tuple[tuple[str, str], ...]
    """(title of a section without records, the sweep that makes them)."""
    provenance: Provenance

    def all_charts(self) -> tuple[Chart, ...]:
        """The figures of all sections."""
        return tuple(chart for _, charts in self.sections for chart in charts)

    def anchors(self) -> frozenset[str]:
        """What a link can lead to."""
        found = {"attribution"} if self.attributions else set()
        for section, charts in self.sections:
            found |= {section.anchor, *(chart.anchor for chart in charts)}
        return frozenset(found)


def content(
    rows: Sequence[Record],
    claims: Sequence[Claim],
    attributions: Sequence[Attribution],
    *,
    asked: str,
    verdict: str,
    problems: Sequence[str] = (),
    command: str = "",
) -> Content:
    """All that the report says about the records."""
    drawn = [(section, tuple(filter(None, (figure(rows) for figure in section.figures)))) for section in SECTIONS]
    missing = [(section.title, section.sweep) for section, charts in drawn if not charts]
    if not attributions:
        missing.insert(0, ("Which step owns the deviation", "steps"))
    return Content(
        asked=asked,
        verdict=verdict,
        claims=tuple(claims),
        attributions=tuple(attributions),
        sections=tuple((section, charts) for section, charts in drawn if charts),
        missing=tuple(missing),
        provenance=provenance(rows, problems, command),
    )
