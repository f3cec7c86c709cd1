"""What a report says, before it is written as a page or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from assay.report.attribution import Attribution
from assay.report.charts import Chart
from assay.report.claims import Claim
from assay.report.figures import SECTIONS, Section
from assay.report.pictures import Picture
from assay.report.provenance import Provenance, provenance
from assay.report.training_section import WEIGHTS, Extra, training_parts
from assay.report.watch_section import watch_parts
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
    """(title of a section without records, the command that makes them)."""
    provenance: Provenance
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """Anchor of a section → what stands before its figures."""

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
    training: Sequence[Record] = (),
    watched: Sequence[Record] = (),
    pictures: Sequence[Picture] = (),
) -> Content:
    """All that the report says about the records; `training` has those of paired training, `watched` of watches."""
    drawn = [(section, tuple(filter(None, (figure(rows) for figure in section.figures)))) for section in SECTIONS]
    missing = [(section.title, f"assay sweep {section.sweep}") for section, charts in drawn if not charts]
    if not attributions:
        missing.insert(0, ("Which step owns the deviation", "assay sweep steps"))
    if not training:
        missing.append((WEIGHTS.title, "assay pair quick"))
    parts = [*training_parts(training, pictures), *watch_parts(watched)]
    return Content(
        asked=asked,
        verdict=verdict,
        claims=tuple(claims),
        attributions=tuple(attributions),
        sections=(
            *((section, charts) for section, charts in drawn if charts),
            *((section, charts) for section, charts, _ in parts),
        ),
        missing=tuple(missing),
        provenance=provenance(rows, problems, command, training, watched),
        extras={section.anchor: extra for section, _, extra in parts},
    )
