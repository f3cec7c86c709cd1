"""Rows of paired training by study: those of another model, other data or another device never share an interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from assay.report.charts import Series
from assay.report.estimates import Estimate
from assay.report.pair_summary import FLASH, INITIALISATION, LOW_PRECISION, NULL
from assay.report.trajectories import Trajectory
from assay.results.record import Record

_SETTING = ("model", "recipe", "data", "parameters", "steps", "device")
_ORDER = (NULL, FLASH, INITIALISATION, *LOW_PRECISION)
_WORDS = {"recipe": "recipe {}", "parameters": "{} parameters", "steps": "{} steps", "data": "{}", "device": "{}"}


def studies(rows: Iterable[Record]) -> dict[str, list[Record]]:
    """Rows by study, each with a name: the model, and whatever else tells it from the others."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for row in sorted(rows, key=_rank):
        groups.setdefault(tuple(row[name] for name in _SETTING), []).append(row)
    varying = [i for i, name in enumerate(_SETTING) if name != "model" and len({key[i] for key in groups}) > 1]
    return {
        ", ".join([str(key[0]), *(_WORDS[_SETTING[i]].format(key[i]) for i in varying)]): group
        for key, group in groups.items()
    }


def _rank(row: Record) -> tuple[bool, int, str]:
    """The paper's pairs first: colours and tables are the same, in whatever order rows were read."""
    pair = row["pair"]
    return pair is not None, _ORDER.index(pair) if pair in _ORDER else len(_ORDER), pair or ""


def described(rows: Sequence[Record]) -> str:
    """What all trainings of a study share, in words."""
    first = rows[0]
    parameters = f"{first['parameters']:,} parameters" if first["parameters"] else ""
    parts = (first["model"], parameters, first["data"], f"{first['steps']} steps", first["device"])
    return "; ".join(str(part) for part in parts if part)


def whole(rows: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Without the seeds of a pair that ended before the others, where two or more did not; and which these are.

    A slope or a ratio over training needs all of it: a study that was stopped, or an arm that diverged, lacks the end.
    """
    ends: dict[str, dict[int, int]] = {}
    for row in rows:
        if row["pair"] is not None:
            seeds = ends.setdefault(row["pair"], {})
            seeds[row["seed"]] = max(seeds.get(row["seed"], 0), row["step"])
    last = max((step for seeds in ends.values() for step in seeds.values()), default=0)
    short: dict[tuple[str, int], int] = {}
    for pair, seeds in ends.items():
        if sum(step == last for step in seeds.values()) >= 2:
            short |= {(pair, seed): step for seed, step in seeds.items() if step < last}
    kept = [row for row in rows if (row["pair"], row["seed"]) not in short]
    return kept, [f"{pair}, seed {seed}, ended at step {step} of {last}" for (pair, seed), step in short.items()]


def runs(rows: Iterable[Record], figure: str) -> dict[str, Trajectory]:
    """Training → its own figure (a loss, a scale) over the steps, in the order of the rows."""
    found: dict[str, Trajectory] = {}
    for row in rows:
        if row["kind"] == "run" and row[figure] is not None:
            run = found.setdefault(row["arm"], Trajectory(row["arm"], {}))
            run.curves.setdefault(row["seed"], {})[row["step"]] = row[figure]
    return found


def series_of(name: str, points: Sequence[tuple[int, Estimate]], colour: int = 0, dash: int = 0) -> Series:
    """(step, figure over the seeds) as a line."""
    return Series(
        name=name,
        x=tuple(float(step) for step, _ in points),
        y=tuple(at.value for _, at in points),
        low=tuple(at.low for _, at in points),
        high=tuple(at.high for _, at in points),
        seeds=tuple(at.seeds for _, at in points),
        colour=colour,
        dash=dash,
    )
