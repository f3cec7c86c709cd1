"""Rows of records as a table: a line for each setting, figures over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from assay.report.estimates import Estimate, estimate_size
from assay.results.record import Record

# What tells settings apart, in the order of the columns; those that do not vary are in the title instead.
_SETTINGS = ("inputs", "variant", "format", "plan", "baseline", "length", "block", "block_shape", "causal", "tensor")
_HEADINGS = {"block_shape": "shape", "variant": "kernel", "causal": "mask"}


class Table(NamedTuple):
    """A table for people."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    settings: int
    """How many of the columns are settings; the others are figures."""


def summarize(rows: Sequence[Record]) -> list[Table]:
    """The records of one sweep: max error of both against golden, their ratio, and what is between them.

    Where more settings vary than a terminal of 80 columns shows, a table for each kind of inputs, kernel or baseline.
    """
    grouped: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        grouped.setdefault(tuple(_setting(row, name) for name in _SETTINGS), []).append(row)
    varying = [i for i in range(len(_SETTINGS)) if len({key[i] for key in grouped}) > 1]
    splits = [i for i in varying if _SETTINGS[i] == "baseline"]
    if len(varying) > 2:
        splits += [i for i in varying if _SETTINGS[i] in ("inputs", "variant")]
    if splits:
        kinds: dict[str, list[Record]] = {}
        for row in rows:
            kinds.setdefault(_setting(row, _SETTINGS[splits[0]]), []).append(row)
        return [table for group in kinds.values() for table in summarize(group)]
    fixed = [
        f"{_HEADINGS.get(name, name)} {value}"
        for i, (name, value) in enumerate(zip(_SETTINGS, next(iter(grouped)), strict=True))
        if i not in varying and value != "-"
    ]
    first = rows[0]
    shape = f"batch {first['batch']}, heads {first['heads']}, dim {first['dim']}"
    headings = tuple(_HEADINGS.get(_SETTINGS[i], _SETTINGS[i]) for i in varying)
    seeds = min(len(group) for group in grouped.values())
    told = f"{', '.join(fixed)}; {shape}, {first['device']}. Largest errors, 95%, {seeds} seeds."
    return [
        Table(
            title=f"{first['sweep']}: {told}",
            columns=(*headings, "error", "base err", "ratio", "between"),
            rows=tuple((*(key[i] for i in varying), *_figures(group)) for key, group in grouped.items()),
            settings=len(varying),
        )
    ]


def ratio(rows: Iterable[Record], figure: str = "max") -> Estimate | None:
    """The variant's error over the baseline's, both against golden, over the seeds."""
    pairs = [(row[f"error_{figure}"], row[f"baseline_error_{figure}"]) for row in rows]
    return estimate_size(ours / theirs if 0 < theirs < math.inf else math.nan for ours, theirs in pairs)


def _figures(group: Sequence[Record]) -> tuple[str, ...]:
    return (
        _size([row["error_max"] for row in group]),
        _size([row["baseline_error_max"] for row in group]),
        _with_interval(ratio(group)),
        _size([row["difference_max"] for row in group]),
    )


def _setting(row: Record, name: str) -> str:
    if name == "block":
        return "-" if row["block_rows"] is None else f"{row['block_rows']}×{row['block_columns']}"
    if name == "causal":
        captured = str(row["distribution"]).endswith(", masked")
        return "causal" if row["causal"] else "as captured" if captured else "full"
    if name == "plan" and row["order"] is None:
        return "-"  # a real kernel has the plan it has
    if name in ("plan", "baseline"):
        family = str(row[name]).replace(f" {row['format']}", "")  # which has a column of its own
        return "fp32_state" if family.startswith("uniform, state in") else family
    return "-" if row[name] is None else str(row[name])


def _size(values: Sequence[float]) -> str:
    """With half its interval in percent; without one only why."""
    if not all(map(math.isfinite, values)):
        return "overflow"
    found = estimate_size(values)
    if found is None:
        return "1 seed"
    return f"{found.value:.1e} {_half(found)}"


def _with_interval(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.value:.3g}× {_half(found)}"


def _half(found: Estimate) -> str:
    """Half the interval in percent, upwards: of a geometric mean that half is the larger one."""
    return f"±{100 * (found.high / found.value - 1) if found.value else 0.0:.0f}%"
