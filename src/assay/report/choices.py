"""What a reader may choose: the columns that differ between records which are otherwise the same point.

Two records that differ in anything but the seed must not enter one interval. So every column that varies is an axis
of the figure, a series, a choice, or, where it follows from those, part of the setting that is printed below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from assay.results.record import Record

Key = Callable[[Record], Any]

_MANTISSA = {"bf16": 7, "fp16": 10, "tf32": 10.5, "fp32": 23, "fp64": 52}
_FIRST = {
    "inputs": ("uniform", "normal"),
    "plan": ("uniform", "shipped"),
    "baseline": ("eager", "uniform"),
    "tensor": ("output", "dq", "dk", "dv"),
    "block shape": ("paper", "swapped", "square"),
}


def mantissa_bits(format: str) -> float:
    """Sorts formats by their mantissa; tf32 stands behind fp16, which has as many bits; the unknown last."""
    found = re.search(r"m(\d+)$", format)
    return _MANTISSA.get(format, float(found[1]) if found else 99)


def family(name: str | None, format: str | None) -> str:
    """A plan's name without its format, so that one plan is followed over formats: "uniform bf16" → "uniform".

    Only the first mention goes: what follows "with" is the plan itself. A state in FP32, for FP64 in FP64, is one
    family too.
    """
    if not name or not format:
        return name or ""
    bare = re.sub(rf"(?<!\w){re.escape(format)}(?!\w)", "", name, count=1)
    bare = re.sub(r", state in fp\d+$", ", state in fp32 or wider", bare)
    return " ".join(bare.split()).replace(" ,", ",") or name


def _block(row: Record) -> str | None:
    return None if row["block_rows"] is None else f"{row['block_rows']}×{row['block_columns']}"


COLUMNS: dict[str, Key] = {
    "inputs": lambda row: row["inputs"],
    "plan": lambda row: family(row["plan"], row["format"]),
    "baseline": lambda row: family(row["baseline"], row["format"]),
    "format": lambda row: row["format"],
    "tensor": lambda row: row["tensor"],
    "variant": lambda row: row["variant"],
    "length": lambda row: row["length"],
    "batch": lambda row: row["batch"],
    "heads": lambda row: row["heads"],
    "dim": lambda row: row["dim"],
    "causal": lambda row: None if row["causal"] is None else ("yes" if row["causal"] else "no"),
    "order": lambda row: row["order"],
    "block shape": lambda row: row["block_shape"],
    "block": _block,
    "options": lambda row: row["options"],
    "device": lambda row: row["device"],
}
"""All that tells one point from another, but the seed, in the order in which choices are offered."""


def latest(rows: Sequence[Record]) -> list[Record]:
    """Each point and seed once, as measured last: a repeat is no new seed and would narrow the interval."""
    kept: dict[tuple[Any, ...], Record] = {}
    for row in sorted(rows, key=lambda row: str(row["time"])):
        kept[(row["sweep"], row["plan"], row["baseline"], row["seed"], *(key(row) for key in COLUMNS.values()))] = row
    return list(kept.values())


def free_columns(rows: Sequence[Record], drawn: Callable[[Record], Any], axes: Sequence[str]) -> list[str]:
    """The columns to choose from: they vary at one place of the drawing, and the columns before do not fix them."""
    chosen: list[str] = []
    for name, key in COLUMNS.items():
        if name in axes:
            continue
        seen: dict[Any, set[Any]] = {}
        for row in rows:
            place = (drawn(row), tuple(COLUMNS[other](row) for other in chosen))
            seen.setdefault(place, set()).add(key(row))
        if any(len(values) > 1 for values in seen.values()):
            chosen.append(name)
    return chosen


def rank(name: str, value: str) -> tuple[Any, ...]:
    """Sorts choices: the paper's setting first, formats by mantissa, numbers by size, the rest by name."""
    first = _FIRST.get(name, ())
    preferred = first.index(value) if value in first else len(first)
    number = float(value) if value.isdecimal() else 0.0
    return preferred, mantissa_bits(value) if name == "format" else 0.0, number, value


def describe(rows: Sequence[Record], left_out: Sequence[str]) -> str:
    """What was held fixed, in words: every column but those left out."""
    parts = []
    for name, key in COLUMNS.items():
        values = sorted(
            {str(key(row)) for row in rows if key(row) not in (None, "", "{}")}, key=lambda v: rank(name, v)
        )
        if name in left_out or not values or (name == "causal" and values == ["no"]):
            continue
        shown = ", ".join(values[:6]) + (f" and {len(values) - 6} more" if len(values) > 6 else "")
        parts.append(shown if name in ("tensor", "variant", "device") else f"{name} {shown}")
    return "; ".join(parts)
