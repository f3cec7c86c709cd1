"""Writes the report: a page, the same as Markdown, and every figure as SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from assay._files import write_whole
from assay.report.attribution import Attribution
from assay.report.claims import Claim
from assay.report.content import content
from assay.report.markdown import markdown
from assay.report.page import page
from assay.report.pictures import Picture
from assay.report.shares import attribution_figure
from assay.report.static_figures import static_figures
from assay.results.record import Record


def write_report(
    rows: list[Record],
    claims: Sequence[Claim],
    attributions: Sequence[Attribution],
    folder: Path,
    *,
    asked: str,
    verdict: str,
    problems: Sequence[str] = (),
    command: str = "",
    training: Sequence[Record] = (),
    watched: Sequence[Record] = (),
    pictures: Sequence[Picture] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write index.html, report.md and figures/ into the folder, each file whole or not at all; the page's path.

    `training` has the rows of paired training, `watched` those of watched models, `pictures` what the trained models
    painted. `progress` is told how many of the figures' files are written.
    """
    if not rows and not training and not watched:
        raise ValueError(
            "A report needs at least one record, and there is none. Measure first (assay sweep precision), "
            "or name the folder that holds the records."
        )
    told = content(
        rows, claims, attributions, asked=asked, verdict=verdict, problems=problems, command=command,
        training=training, watched=watched, pictures=pictures,
    )  # fmt: skip
    html, text = page(told), markdown(told)
    shares = attribution_figure(attributions)
    charts = [*([shares] if shares else []), *told.all_charts()]
    total = 2 * sum(len(chart.variants) for chart in charts)
    for done, (name, image) in enumerate(static_figures(charts)):
        progress(done, total)
        write_whole(folder / "figures" / name, image)
    write_whole(folder / "report.md", text.encode())
    write_whole(folder / "index.html", html.encode())
    return folder / "index.html"
