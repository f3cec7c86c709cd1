"""What the paper compares of Figure 8, as a table: levels, slopes, and how many times those of flash they are."""

from __future__ import annotations

from collections.abc import Sequence

from assay.report.estimates import Estimate
from assay.report.judgement import times
from assay.report.pair_summary import FLASH, NULL
from assay.report.summary import Table
from assay.report.training_rows import studies, whole
from assay.report.trajectories import ratio, slope_ratio, trajectories
from assay.results.record import Record

_COLUMNS = ("pair", "differs in", "seeds", "W1 at the end", "W1 a step", "max at the end", "W1 / flash",
            "slope / flash")  # fmt: skip


def slope_tables(rows: Sequence[Record]) -> list[Table]:
    """One for each study."""
    return [_table(name, whole(group)[0]) for name, group in studies(rows).items() if _pairs(group)]


def _table(name: str, rows: list[Record]) -> Table:
    w1, most = trajectories(rows, "w1"), trajectories(rows, "max")
    changed = {row["pair"]: f"{row['changed']}: {row['changed_to']}" for row in _pairs(rows) if row["changed"]}
    flash = w1.get(FLASH)
    lines = []
    for pair, found in w1.items():
        over = steeper = None
        if flash is not None and pair not in (FLASH, NULL):
            over, steeper = ratio(found, flash), slope_ratio(found, flash)
        lines.append(
            (
                pair,
                changed.get(pair, "nothing"),
                str(len(found.curves)),
                *map(_size, (found.last, found.slope, most[pair].last if pair in most else None)),
                *("–" if each is None else times(each) for each in (over, steeper)),
            )
        )
    last = max((found.steps[-1] for found in w1.values() if found.steps), default=0)
    title = f"{name}: the weights at step {last}, means over the seeds with 95% intervals"
    return Table(title, _COLUMNS, tuple(lines), 2)


def _pairs(rows: Sequence[Record]) -> list[Record]:
    return [row for row in rows if row["pair"] is not None and row["kind"] == "weights"]


def _size(found: Estimate | None) -> str:
    return "–" if found is None else f"{found.value:.2g} [{found.low:.2g}, {found.high:.2g}]"
