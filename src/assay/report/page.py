"""The page: one HTML file that opens offline, asks for nothing, and lets a reader choose what a figure shows."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from typing import Any

from assay.report import palette
from assay.report.attribution_section import attribution_section
from assay.report.charts import Chart, Series
from assay.report.content import Content
from assay.report.page_parts import claims_section, figure_block, left_out, provenance_section
from assay.report.training_section import Extra, extra_block

TITLE = "Is Flash Attention stable?"


def page(content: Content) -> str:
    """The whole page as text."""
    scripts = (_plotly(), _own("page.js"))
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    # Only these two scripts may run, and nothing may be fetched; styles are inline because Plotly writes some.
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    body, contents = _sections(content)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="Assay">
<title>{TITLE} An Assay report</title>
<style>{_own("page.css")}{palette.css()}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the findings</a>
<header>
<p class="eyebrow">Assay report</p>
<h1>{TITLE}</h1>
<p class="asked">{escape(content.asked)}</p>
<p class="verdict"><strong>{escape(content.verdict)}</strong></p>
<noscript><p class="lead">The figures need JavaScript; report.md beside this page has them all.</p></noscript>
</header>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
<main id="main" tabindex="-1">
{body}
</main>
<footer><p>Means over seeds with 95% intervals; a point without an interval is not shown. Golden is attention in FP64
on the same rounded inputs.</p></footer>
<script type="application/json" id="charts">{embed([chart_data(c) for c in content.all_charts()])}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _sections(content: Content) -> tuple[str, str]:
    anchors = content.anchors()
    blocks = [("claims", "The paper's claims", claims_section(content.claims, anchors))] if content.claims else []
    if content.attributions:
        blocks.append(("attribution", "Which step owns the deviation", attribution_section(content.attributions)))
    for section, charts in content.sections:
        figures = extra_block(content.extras.get(section.anchor, Extra())) + "".join(map(figure_block, charts))
        blocks.append((section.anchor, section.title, f'<p class="lead">{escape(section.text)}</p>{figures}'))
    if content.missing:
        blocks.append(("left-out", "Not measured here", left_out(content.missing)))
    blocks.append(("provenance", "Where the figures come from", provenance_section(content.provenance)))
    body = "".join(
        f'<section id="{anchor}" aria-labelledby="{anchor}-title"><h2 id="{anchor}-title">{escape(title)}</h2>'
        f"{html}</section>\n"
        for anchor, title, html in blocks
    )
    return body, "".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title, _ in blocks)


def embed(value: Any) -> str:
    """JSON that no text can leave: not a script element, not an entity, not a line that ends too early."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def chart_data(chart: Chart) -> dict[str, Any]:
    """What the page's script needs to draw a chart."""
    return {
        "anchor": chart.anchor,
        "title": chart.title,
        "x_title": chart.x_title,
        "y_title": chart.y_title,
        "kind": chart.kind,
        "x_log": chart.x_log,
        "y_log": chart.y_log,
        "band": chart.band,
        "reference": chart.reference,
        "categories": chart.categories,
        "variants": [
            {
                "choices": [value for _, value in variant.choices],
                "setting": variant.setting,
                "notes": variant.notes,
                "series": [_series_data(series) for series in variant.series],
            }
            for variant in chart.variants
        ],
    }


def _series_data(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "colour": series.colour,
        "dash": palette.DASHES[series.dash % len(palette.DASHES)][0],
        "marker": palette.MARKERS[series.colour % len(palette.MARKERS)][0],
        "x": series.x,
        **{name: [float(f"{value:.5g}") for value in getattr(series, name)] for name in ("y", "low", "high")},
        "seeds": series.seeds,
        "extra": series.extra,
    }


def _plotly() -> str:
    try:
        return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("The report needs plotly: pip install 'assay[report]'", name="plotly") from None


def _own(name: str) -> str:
    return (files("assay.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
