"""The rows of a watch put together: one tensor of one call, as a whole and head by head."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from assay.results.schema import Record


@dataclass(frozen=True, slots=True)
class Compared:
    """One tensor of one call."""

    whole: Record
    """The row of all heads."""
    heads: list[Record]

    @property
    def worst_head(self) -> Record | None:
        """The head that is worst; None where none is worse than the whole."""
        found = max(self.heads, key=badness, default=self.whole)
        return found if badness(found) > badness(self.whole) else None

    @property
    def worst(self) -> Record:
        """The whole, or the head that is worse."""
        return self.worst_head or self.whole

    @property
    def over(self) -> Record | None:
        """What is over budget: the whole or, where that is not, its worst head."""
        return next((row for row in (self.whole, self.worst) if row["over"]), None)

    @property
    def nonfinite(self) -> bool:
        """Whether it has NaN or infinities; golden may have them too."""
        return bool(self.whole["actual_nonfinite"])


def compared(rows: Iterable[Record]) -> list[Compared]:
    """In the order of the rows; heads whose whole is not there are left out."""
    groups: dict[tuple[object, ...], tuple[list[Record], list[Record]]] = {}
    for row in rows:
        key = (*call_of(row), row["tensor"])
        groups.setdefault(key, ([], []))[row["head"] is not None].append(row)
    return [Compared(whole, heads) for wholes, heads in groups.values() for whole in wholes]


def call_of(row: Record) -> tuple[object, ...]:
    """The same for all rows of one call."""
    return row["watch"], row["layer"], row["step"], row["call"]


def badness(row: Record) -> float:
    """The error over the other's, or the difference where that is all there is; inf where NaN is in a wrong place."""
    if row["ratio_rmse"] is None:
        wrong, found = row["difference_max"] == math.inf, row["difference_rmse"]
    else:
        wrong, found = bool(row["error_nonfinite"]), row["ratio_rmse"]
    return math.inf if wrong or found is None or found != found else float(found)


def head_cell(found: Iterable[Compared]) -> str:
    """The worst head of some calls, for a table; a dash where none is worse than its call, or none was judged."""
    heads = [one.worst_head for one in found]
    row = max((row for row in heads if row is not None), key=badness, default=None)
    return "–" if row is None or row["ratio_rmse"] is None else f"{row['ratio_rmse']:.2f} (head {row['head']})"


def place(row: Record) -> str:
    """What and where it is, for a sentence."""
    head = "" if row["head"] is None else f" (head {row['head']})"
    return f"{row['tensor']} of {row['layer'] or 'the model'}{head} at step {row['step']}"


def place_of_nonfinite(row: Record) -> str:
    """The same of a row that has NaN or infinities, with how many and whether golden has them too."""
    count, wrong = row["actual_nonfinite"], row["error_nonfinite"]
    golden = "" if wrong is None else f", {wrong:,.0f} unlike golden" if wrong else ", as in golden"
    return f"{place(row)} ({count:,.0f} element{'s' if count != 1 else ''}{golden})"


def why_over(row: Record) -> str:
    """By how much it is over budget, or what is wrong with it."""
    if row["error_nonfinite"]:
        return f"NaN or infinity unlike golden in {row['error_nonfinite']:,.0f} elements"
    return f"{row['ratio_rmse']:.2g} times the baseline's error (largest {row['ratio_max']:.2g})"
