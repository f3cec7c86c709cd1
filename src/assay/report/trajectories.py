"""How far apart the pairs of a study were, step by step: levels, slopes, ratios, each over seeds with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from assay.report.estimates import Estimate, estimate, estimate_size
from assay.results.record import Record

Curve = dict[int, float]
"""Step → figure."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One figure of one pair over training, seed by seed."""

    pair: str
    curves: dict[int, Curve]
    """Seed → curve."""

    @property
    def steps(self) -> list[int]:
        """Where every seed was compared."""
        found = [set(curve) for curve in self.curves.values()]
        return sorted(set.intersection(*found)) if found else []

    def at(self, step: int) -> Estimate | None:
        """The figure at a step, over the seeds."""
        return estimate_size(curve[step] for curve in self.curves.values())

    @property
    def last(self) -> Estimate | None:
        """At the end."""
        return self.at(self.steps[-1]) if self.steps else None

    def slopes(self) -> dict[int, float]:
        """Seed → change of the figure a step: the line of least squares from the first comparison to the last."""
        steps = self.steps
        return {seed: _slope([(step, curve[step]) for step in steps]) for seed, curve in self.curves.items()}

    @property
    def slope(self) -> Estimate | None:
        """Over the seeds."""
        return estimate(self.slopes().values())


def trajectories(rows: Iterable[Record], figure: str, kind: str = "weights", layer: str = "") -> dict[str, Trajectory]:
    """Pair → its trajectory, in the order of the rows."""
    found: dict[str, dict[int, Curve]] = {}
    for row in rows:
        if row["pair"] is not None and row["kind"] == kind and row["layer"] == layer and row[figure] is not None:
            found.setdefault(row["pair"], {}).setdefault(row["seed"], {})[row["step"]] = row[figure]
    return {pair: Trajectory(pair, curves) for pair, curves in found.items()}


def ratio(one: Trajectory, other: Trajectory) -> Estimate | None:
    """How many times as large `one` is as `other` at the end: seed by seed, then over the seeds."""
    return _paired(one, other, lambda t, seed: t.curves[seed][t.steps[-1]])


def slope_ratio(one: Trajectory, other: Trajectory) -> Estimate | None:
    """The same of their slopes."""
    slopes = {id(one): one.slopes(), id(other): other.slopes()}
    return _paired(one, other, lambda t, seed: slopes[id(t)][seed])


def _paired(one: Trajectory, other: Trajectory, value: Callable[[Trajectory, int], float]) -> Estimate | None:
    seeds = [seed for seed in one.curves if seed in other.curves]
    if not seeds or not one.steps or one.steps[-1:] != other.steps[-1:]:
        return None
    pairs = [(value(one, seed), value(other, seed)) for seed in seeds]
    if any(not (math.isfinite(a) and math.isfinite(b) and b > 0 and a >= 0) for a, b in pairs):
        return None
    return estimate_size(a / b for a, b in pairs)


def _slope(points: Sequence[tuple[int, float]]) -> float:
    if len(points) < 2:
        return math.nan
    mean_x, mean_y = (math.fsum(values) / len(points) for values in zip(*points, strict=True))
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
