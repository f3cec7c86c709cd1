"""Pieces of the page's HTML: the claims, a figure's frame, the origin of the records. All text is escaped here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from html import escape

from assay.report.charts import Chart
from assay.report.claims import Claim
from assay.report.provenance import Provenance

_LOOK = {
    "holds": ("good", "✓"),
    "holds only when …": ("partly", "◐"),
    "does not hold": ("bad", "✗"),
    "undecided": ("partly", "?"),
    "not measured here": ("none", "–"),
}
_MOST = 3
"""Lines of ours that a claim shows at once."""
_HEADS = ("Claim", "The paper says", "Paper", "Here", "Verdict")


def claims_section(claims: Sequence[Claim], anchors: Collection[str]) -> str:
    """The table of claims. Roles are written out, because on a narrow screen its rows become cards."""
    heads = "".join(f'<th role="columnheader" scope="col">{head}</th>' for head in _HEADS)
    rows = "".join(_claim(claim, anchors) for claim in claims)
    counts = Counter[str](claim.verdict for claim in claims if claim.number != "null")
    told = "; ".join(f"{counts[verdict]} {_of(verdict, counts[verdict])}" for verdict in _LOOK if counts[verdict])
    return f"""<div class="scroll claims-box"><table class="claims" role="table">
<caption>What the paper claims and what the records here say: {escape(told)}.</caption>
<thead role="rowgroup"><tr role="row">{heads}</tr></thead><tbody role="rowgroup">{rows}</tbody></table></div>"""


def _of(verdict: str, count: int) -> str:
    return verdict if count == 1 else verdict.replace("holds", "hold").replace("does", "do")


def _claim(claim: Claim, anchors: Collection[str]) -> str:
    look, mark = _LOOK[claim.verdict]
    link = ""
    if claim.anchor in anchors:
        name = escape(claim.number)
        link = f' <a href="#{escape(claim.anchor)}" aria-label="Chart for claim {name}">See the chart</a>'
    lines = [f"<li>{escape(line)}</li>" for line in claim.ours]
    ours = f'<ul class="plain">{"".join(lines[:_MOST])}</ul>'
    if len(lines) > _MOST:
        more = f"and {len(lines) - _MOST} more"
        ours += f'<details><summary>{more}</summary><ul class="plain">{"".join(lines[_MOST:])}</ul></details>'
    return f"""<tr role="row"><th role="rowheader" scope="row">{escape(claim.number)}
<span class="small">{escape(claim.figure)}</span></th>
<td role="cell" data-head="The paper says">{escape(claim.text)}</td>
<td role="cell" data-head="Paper">{escape(claim.paper)}</td>
<td role="cell" data-head="Here">{ours}</td>
<td role="cell" data-head="Verdict"><span class="badge {look}"><span aria-hidden="true">{mark}</span>
{escape(claim.verdict)}</span><span class="because">{escape(claim.because)}{link}</span></td></tr>
"""


def figure_block(chart: Chart) -> str:
    """The frame of a figure; the page's script fills in the plot, its legend, the setting and the table."""
    name = escape(chart.anchor)
    selects = "".join(
        f'<div class="field"><label for="{name}-choice-{index}">{escape(label.capitalize())}</label>'
        f'<select id="{name}-choice-{index}" data-choice="{index}">'
        + "".join(f'<option value="{escape(value)}">{escape(_short(value))}</option>' for value in values)
        + "</select></div>"
        for index, (label, values) in enumerate(chart.options().items())
    )
    pressed = "true" if chart.y_log else "false"
    return f"""<figure class="chart" id="{name}" aria-labelledby="{name}-title">
<h3 id="{name}-title">{escape(chart.title)}</h3>
<p class="caption">{escape(chart.caption)}</p>
<div class="controls" role="group" aria-label="Controls of {escape(chart.title)}">{selects}
<div class="buttons"><button type="button" class="log" aria-pressed="{pressed}">Log scale</button>
<button type="button" class="reset">Reset zoom</button></div></div>
<ul class="legend" aria-label="Series, to show or hide"></ul>
<div class="plot" role="img" aria-label="{escape(chart.title)}. {escape(chart.caption)} The data table follows."></div>
<figcaption><p class="setting" aria-live="polite"></p><ul class="notes"></ul></figcaption>
<details><summary>Data</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Data of {escape(chart.title)}">
<table><caption></caption><thead></thead><tbody></tbody></table></div></details>
</figure>
"""


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def left_out(missing: Sequence[tuple[str, str]]) -> str:
    """Which sections are missing, and what makes them."""
    lines = "".join(
        f"<li>{escape(title)}: <code>{escape(command)}</code> measures it.</li>" for title, command in missing
    )
    return f'<ul class="plain">{lines}</ul>'


def provenance_section(found: Provenance) -> str:
    """Devices, versions, shapes, seeds; what went wrong when reading stands first."""
    warnings = "".join(f"<li>{escape(text)}</li>" for text in found.warnings)
    facts = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in found.facts)
    box = f'<div class="warning" role="note"><p><strong>Mind:</strong></p><ul>{warnings}</ul></div>' if warnings else ""
    return f'{box}<dl class="facts">{facts}</dl>'
