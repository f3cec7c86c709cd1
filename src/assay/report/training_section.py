"""The report's part about paired training: findings, tables, figures, samples."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from assay.report.charts import Chart
from assay.report.figures import Section
from assay.report.layers_figure import layers_figure
from assay.report.pair_summary import verdicts
from assay.report.pair_tables import slope_tables
from assay.report.pictures import Picture
from assay.report.summary import Table
from assay.report.training_figures import (
    figure_7,
    figure_8,
    held_out_figure,
    loss_figure,
    ratio_figure,
    scale_figure,
    skipped_figure,
)
from assay.report.training_rows import studies, whole
from assay.results.record import Record

WEIGHTS = Section(
    "training",
    "Paired training",
    "Trainings that differ in one thing, everything else alike: how far their weights part.",
    "",
    (figure_7, figure_8, ratio_figure, layers_figure),
)
PROGRESS = Section(
    "trainings",
    "How the trainings went",
    "Loss curves that lie on each other say that the arms learn alike, however far their weights are apart.",
    "",
    (loss_figure, held_out_figure, scale_figure, skipped_figure),
)
SAMPLES = Section("samples", "Samples", "What the trained model makes of captions it has never seen.", "", ())


class Extra(NamedTuple):
    """What stands in a section before its figures."""

    words: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


Part = tuple[Section, tuple[Chart, ...], Extra]


def training_parts(rows: Sequence[Record], pictures: Sequence[Picture]) -> list[Part]:
    """The sections that have something to say."""
    extras = {WEIGHTS: Extra(tuple(findings(rows)), tuple(slope_tables(rows))), SAMPLES: Extra(pictures=(*pictures,))}
    made = []
    for section in (WEIGHTS, PROGRESS, SAMPLES):
        charts = tuple(filter(None, (figure(rows) for figure in section.figures))) if rows else ()
        extra = extras.get(section, Extra())
        if charts or any(extra):
            made.append((section, charts, extra))
    return made


def findings(rows: Sequence[Record]) -> list[str]:
    """The verdict on each arm, in plain words; with the study's name where there are several."""
    found = studies([row for row in rows if row["pair"] is not None])
    return [
        f"{name}, {words}" if len(found) > 1 else words
        for name, group in found.items()
        for words in verdicts(whole(group)[0])
    ]


def extra_block(extra: Extra) -> str:
    """As HTML."""
    words = "".join(f"<li>{_arm_first(text)}</li>" for text in extra.words)
    box = f'<ul class="findings">{words}</ul>' if words else ""
    return box + "".join(map(_table, extra.tables)) + "".join(map(_picture, extra.pictures))


def _arm_first(text: str) -> str:
    arm, colon, rest = text.partition(": ")
    return f"<b>{escape(arm)}</b>{colon}{escape(rest)}" if colon else escape(text)


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1 : table.settings])
        + "".join(f"<td>{_stacked(cell)}</td>" for cell in row[table.settings :])
        + "</tr>"
        for row in table.rows
    )
    title = escape(table.title)
    return f"""<div class="scroll slopes" tabindex="0" role="region" aria-label="{title}"><table>
<caption>{title}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>
"""


def _stacked(cell: str) -> str:
    """An interval under its value."""
    value, bracket, interval = cell.partition(" [")
    return f'{escape(value)} <span class="small">[{escape(interval)}</span>' if bracket else escape(cell)


def _picture(picture: Picture) -> str:
    captions = "".join(f"<li>{escape(caption)}</li>" for caption in picture.captions)
    shown = f'<ol class="captions">{captions}</ol>' if captions else ""
    credit = f'<p class="small">{escape(picture.attribution)}</p>' if picture.attribution else ""
    return f"""<figure class="sample"><h3>{escape(picture.title)}</h3>
<img src="{picture.address}" alt="{escape(picture.described)}">
<figcaption>{shown}{credit}</figcaption></figure>
"""
