"""How far apart pairs were: levels, slopes and ratios, against SciPy and a pencil."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from assay.report.trajectories import Trajectory, ratio, slope_ratio, trajectories
from assay.results.record import Record
from assay.results.training_record import TRAINING


def row(**changes: object) -> Record:
    found: Record = dict.fromkeys(TRAINING.columns)
    return found | {"pair": "flash", "kind": "weights", "layer": "", "seed": 0, "step": 1, "w1": 0.0} | changes


def curve(seed: int, start: float, growth: float) -> dict[int, float]:
    """A line, and something of its own for every seed."""
    return {step: start + growth * step + 0.01 * math.sin(step + seed) for step in (1, 10, 20, 30)}


def made(start: float, growth: float, seeds: tuple[int, ...] = (0, 1, 2)) -> Trajectory:
    return Trajectory("pair", {seed: curve(seed, start, growth * (1 + 0.1 * seed)) for seed in seeds})


def test_rows_become_curves() -> None:
    rows = [row(seed=seed, step=step, w1=10.0 * seed + step) for seed in (0, 1) for step in (1, 20)]
    rows += [row(pair="other", w1=5.0), row(kind="gradients", w1=7.0), row(layer="block", w1=8.0)]
    rows += [row(pair=None, kind="run", w1=None), row(pair="empty", w1=None)]
    found = trajectories(rows, "w1")
    assert list(found) == ["flash", "other"]
    assert found["flash"].curves == {0: {1: 1.0, 20: 20.0}, 1: {1: 11.0, 20: 30.0}}
    assert trajectories(rows, "w1", kind="gradients")["flash"].curves == {0: {1: 7.0}}
    assert trajectories(rows, "w1", layer="block")["flash"].curves == {0: {1: 8.0}}


def test_slopes_are_lines_of_least_squares() -> None:
    found = made(0.5, 0.03)
    expected = [stats.linregress(list(c), list(c.values())).slope for c in found.curves.values()]
    assert list(found.slopes().values()) == pytest.approx(expected, rel=1e-12)
    slope = found.slope
    assert slope is not None
    interval = stats.t.interval(0.95, 2, loc=sum(expected) / 3, scale=stats.sem(expected))
    assert (slope.value, slope.low, slope.high) == pytest.approx((sum(expected) / 3, *interval), rel=1e-4)


def test_levels_are_geometric_means() -> None:
    found = made(0.5, 0.03)
    last = found.last
    assert last is not None
    values = [c[30] for c in found.curves.values()]
    assert last.value == pytest.approx(stats.gmean(values))
    assert last.low < min(values) < max(values) < last.high
    assert found.at(10) != last
    assert made(0.5, 0.03, seeds=(0,)).last is None  # one seed has no interval


def test_only_steps_of_all_seeds_count() -> None:
    """A seed whose arm stopped early shortens the comparison, and nothing is made up for it."""
    found = made(0.5, 0.03)
    del found.curves[1][30]
    assert found.steps == [1, 10, 20]
    assert found.last == found.at(20)
    assert Trajectory("none", {}).steps == []
    assert Trajectory("none", {}).last is None
    assert Trajectory("apart", {0: {1: 1.0}, 1: {2: 1.0}}).last is None


def test_ratios_are_taken_seed_by_seed() -> None:
    one, other = made(1.0, 0.06), made(0.5, 0.03)
    found, slopes = ratio(one, other), slope_ratio(one, other)
    assert found is not None
    assert slopes is not None
    assert found.value == pytest.approx(stats.gmean([one.curves[s][30] / other.curves[s][30] for s in range(3)]))
    assert slopes.value == pytest.approx(stats.gmean([one.slopes()[s] / other.slopes()[s] for s in range(3)]))
    assert found.low < 2 < found.high + 0.05
    itself = ratio(one, one)
    assert itself is not None
    assert itself[:3] == (1, 1, 1)
    zero = Trajectory("null", {seed: dict.fromkeys((1, 10, 20, 30), 0.0) for seed in range(3)})
    nothing = ratio(zero, one)
    assert nothing is not None
    assert nothing[:3] == (0, 0, 0)


def test_no_ratio_where_there_is_none() -> None:
    one = made(1.0, 0.06)
    zero = Trajectory("null", {seed: dict.fromkeys((1, 10, 20, 30), 0.0) for seed in range(3)})
    assert ratio(one, zero) is None
    assert ratio(one, Trajectory("none", {})) is None
    assert ratio(one, Trajectory("others", {7: curve(7, 1, 1)})) is None
    shorter = Trajectory("shorter", {seed: {1: 1.0, 10: 2.0} for seed in range(3)})
    assert ratio(one, shorter) is None  # another step is another level
    spoilt = Trajectory("spoilt", {seed: {**curve(seed, 1, 1), 30: math.nan} for seed in range(3)})
    assert ratio(one, spoilt) is None
    assert slope_ratio(one, made(1.0, -0.06)) is None
    assert slope_ratio(one, Trajectory("short", {seed: {30: 1.0} for seed in range(3)})) is None
