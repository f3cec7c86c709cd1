"""The report as Markdown: the same claims, shares and figures, for those who read text or keep it in git."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from assay.report.attribution import Attribution
from assay.report.charts import Chart, Variant
from assay.report.claims import Claim
from assay.report.content import Content
from assay.report.pictures import FOLDER
from assay.report.shares import MEASURES, attribution_figure, headline, percent, setting
from assay.report.static_figures import file_name
from assay.report.training_section import Extra


def markdown(content: Content) -> str:
    """The whole report as text."""
    parts = ["# Is Flash Attention stable?", text(content.asked), f"**{text(content.verdict)}**"]
    if content.claims:
        parts += ["## The paper's claims", _claims(content.claims, {c.anchor: c.title for c in content.all_charts()})]
    shares = attribution_figure(content.attributions)
    if shares is not None:
        parts += ["## Which step owns the deviation", text(shares.caption)]
        for found, variant in zip(content.attributions, shares.variants, strict=True):
            parts += _attribution(found, shares, variant)
    for section, charts in content.sections:
        parts += [f"## {text(section.title)}", text(section.text)]
        parts += _extra(content.extras.get(section.anchor, Extra()))
        for chart in charts:
            parts += _chart(chart)
    if content.missing:
        lines = [f"- {text(title)}: `{command}` measures it." for title, command in content.missing]
        parts += ["## Not measured here", "\n".join(lines)]
    parts += ["## Where the figures come from"]
    if content.provenance.warnings:
        parts.append("\n".join(f"- **Mind:** {text(warning)}" for warning in content.provenance.warnings))
    parts.append(_table(("what", "value"), content.provenance.facts))
    parts.append("Means over seeds with 95% intervals; a point without an interval is not shown.")
    return "\n\n".join(parts) + "\n"


def text(value: str) -> str:
    """Text that means itself: no markup, no HTML, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&!])", r"\\\1", " ".join(value.split()))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([text(cell) for cell in row] for row in rows)]
    return "\n".join(map(_line, lines))


def _claims(claims: Sequence[Claim], titles: Mapping[str, str]) -> str:
    heads = ("claim", "the paper says", "paper", "here", "verdict", "because")
    lines = [_line(heads), _line(["---"] * len(heads))]
    for c in claims:
        link = f" [The chart](#{_slug(titles[c.anchor])})." if c.anchor in titles else ""
        number = f"{c.number} ({c.figure})" if c.figure else c.number
        cells = [text(cell) for cell in (number, c.text, c.paper, "; ".join(c.ours), c.verdict, c.because)]
        lines.append(_line([*cells[:-1], cells[-1] + link]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _slug(heading: str) -> str:
    """The anchor that GitHub and others give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _attribution(found: Attribution, chart: Chart, variant: Variant) -> list[str]:
    start, lead, rest = headline(found)
    rows = [
        (step.step, *(percent(get(step)) for _, get in MEASURES.values()), str(step.owns.seeds)) for step in found.steps
    ]
    return [
        f"{text(start)}**{text(lead)}**{text(rest)}",
        _image(chart, variant),
        _table(("step", *MEASURES, "seeds"), rows),
        f"{text(setting(found))}.",
    ]


def _image(chart: Chart, variant: Variant) -> str:
    return f"![{text(chart.title)}](figures/{file_name(chart, variant)}.svg)"


def _extra(extra: Extra) -> list[str]:
    parts = ["\n".join(f"- {text(words)}" for words in extra.words)] if extra.words else []
    for table in extra.tables:
        parts += [f"**{text(table.title)}**", _table(table.columns, table.rows)]
    for picture in extra.pictures:
        parts += [f"### {text(picture.title)}", f"![{text(picture.described)}]({FOLDER}/{quote(picture.file)})"]
        parts += [text(picture.attribution)] if picture.attribution else []
    return parts


def _chart(chart: Chart) -> list[str]:
    first, *others = chart.variants
    parts = [f"### {text(chart.title)}", text(chart.caption), *_variant(chart, first)]
    if others:
        parts.append(f"<details><summary>{len(others)} other choices</summary>")
        for variant in others:
            parts += _variant(chart, variant)
        parts.append("</details>")
    return parts


def _variant(chart: Chart, variant: Variant) -> list[str]:
    rows = [
        (_say(x), series.name, f"{y:.3g}", f"[{low:.3g}, {high:.3g}]", str(seeds))
        for series in variant.series
        for x, y, low, high, seeds in zip(series.x, series.y, series.low, series.high, series.seeds, strict=True)
    ]
    table = _table((chart.x_title, "series", chart.y_title, "95%", "seeds"), rows)
    if chart.kind == "heat" or chart.band:
        table = f"<details><summary>Data</summary>\n\n{_wide(chart, variant)}\n\n</details>"
    parts = [f"**{text(variant.name)}**"] if variant.name else []
    parts += [_image(chart, variant), table]
    parts += [text(note) for note in (variant.setting, *variant.notes) if note]
    return parts


def _wide(chart: Chart, variant: Variant) -> str:
    """A column for each step, a row for each series, and the other way round for bands: long tables are not read."""
    places = sorted({float(x) for series in variant.series for x in series.x})
    names = [series.name for series in variant.series]
    cells = {
        (series.name, float(x)): f"{y:.2g}" if chart.kind == "heat" else f"{y:.3g} [{low:.3g}, {high:.3g}]"
        for series in variant.series
        for x, y, low, high in zip(series.x, series.y, series.low, series.high, strict=True)
    }
    if chart.kind == "heat":
        heads = ["layer", *(f"{chart.x_title} {x:g}" for x in places)]
        return _table(heads, [[name, *(cells.get((name, x), "–") for x in places)] for name in names])
    heads = [chart.x_title, *map(text, names)]
    return _table(heads, [[f"{x:g}", *(cells.get((name, x), "–") for name in names)] for x in places])


def _say(x: str | float) -> str:
    return x if isinstance(x, str) else f"{x:g}"
