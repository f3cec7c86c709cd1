"""Records by setting: those that differ in more than the seed never share an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from assay.report.choices import COLUMNS
from assay.report.estimates import Estimate, estimate
from assay.results.record import Record


def family_of(row: Record) -> str:
    """The plan without its format."""
    return str(COLUMNS["plan"](row))


def baseline_of(row: Record) -> str:
    """The baseline's plan without its format."""
    return str(COLUMNS["baseline"](row))


def by_setting(
    rows: Iterable[Record], *, vary: Sequence[str], always: Sequence[str] = ("inputs",), paper: bool = True
) -> dict[str, list[Record]]:
    """The records by what they do not share, but for the seed and what the claim varies; each setting with a name.

    `paper`: of the paper's plan and baseline only. Columns that are the same everywhere are not named.
    """
    groups: dict[tuple[object, ...], list[Record]] = {}
    columns = [name for name in COLUMNS if name not in vary]
    for row in rows:
        if not paper or (family_of(row), baseline_of(row)) == ("uniform", "eager"):
            groups.setdefault(tuple(COLUMNS[name](row) for name in columns), []).append(row)
    named = [
        i
        for i, name in enumerate(columns)
        if name not in ("plan", "baseline") and (name in always or len({key[i] for key in groups}) > 1)
    ]
    words = {"length": "N {}", "causal": "causal {}", "heads": "{} heads", "batch": "batch {}", "dim": "D {}"}
    return {
        ", ".join(words.get(columns[i], "{}").format(key[i]) for i in named): group for key, group in groups.items()
    }


def usual_setting(rows: Iterable[Record]) -> list[Record]:
    """Of the settings that differ in more than inputs and plan the usual one: N 1024, else the middle, most seeds."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for row in rows:
        key = tuple(get(row) for name, get in COLUMNS.items() if name not in ("inputs", "plan", "block shape"))
        groups.setdefault(key, []).append(row)
    if not groups:
        return []
    lengths = sorted({group[0]["length"] for group in groups.values()})
    length = 1024 if 1024 in lengths else lengths[len(lengths) // 2]
    return max((g for g in groups.values() if g[0]["length"] == length), key=len)


def one_a_seed(rows: Iterable[Record]) -> list[Record]:
    """A record a seed: two sweeps may have measured the same setting, one with more seeds."""
    return list({row["seed"]: row for row in rows}.values())


def area_of(row: Record) -> int:
    """Rows × columns of the block."""
    return int(row["block_rows"] * row["block_columns"])


def length_of(row: Record) -> int:
    """Of the sequence."""
    return int(row["length"])


def slope_over_seeds(
    rows: list[Record], x: Callable[[Record], int], y: str, over: str | None = None
) -> Estimate | None:
    """The slope of log y against log x by least squares, over the seeds."""
    seeds: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        value = row[y] / row[over] if over else row[y]
        if value > 0 and math.isfinite(value):
            seeds.setdefault(row["seed"], []).append((math.log(x(row)), math.log(value)))
    slopes = []
    for points in seeds.values():
        middle = math.fsum(a for a, _ in points) / len(points)
        spread = math.fsum((a - middle) ** 2 for a, _ in points)
        if spread > 0:
            slopes.append(math.fsum((a - middle) * b for a, b in points) / spread)
    return estimate(slopes)
