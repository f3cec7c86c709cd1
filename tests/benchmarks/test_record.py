"""The record's arithmetic and its file: no GPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.record import (
    CUDNN,
    DIMS,
    FP16,
    GOALS,
    LENGTHS,
    OURS,
    PARTS,
    PLAIN,
    Case,
    Record,
    cases,
    geometric_mean,
    judged,
    read,
)
from tests.benchmarks.samples import ENVIRONMENT, point, record

FULL = Case(dim=128, length=4096, causal=False, parts=("forward",))


def empty() -> Record:
    return Record(date="2026-01-02", environment=dict(ENVIRONMENT))


def verdict(made: Record, name: str) -> tuple[object, bool | None]:
    found = next(v for v in judged(made) if v.name == name)
    return found.measured, found.met


def seen(queries: int, keys: int, *, left: float, right: float) -> int:
    """Pairs, counted one by one."""
    return sum(-right <= q - k <= left for q in range(queries) for k in range(keys))


@pytest.mark.parametrize(
    ("case", "pairs", "slack"),
    [
        (replace(FULL, length=64), seen(64, 64, left=math.inf, right=math.inf), 0),
        (replace(FULL, length=64, causal=True), seen(64, 64, left=math.inf, right=0), 32),
        (replace(FULL, kind="window", length=64, window=16), seen(64, 64, left=15, right=0), 8),
        (replace(FULL, kind="packed", length=16384, packed=(64, 32)), 64**2 + 32**2, 0),
    ],
)
def test_flops_count_the_pairs_that_are_seen(case: Case, pairs: int, slack: int) -> None:
    """Half of the square leaves out half of the diagonal, as everybody does: `slack` pairs a sequence."""
    assert case.pairs / case.batch == pairs - slack


def test_products_of_each_pass() -> None:
    forward = FULL.flops("forward")
    assert forward == 4 * 16384 * 4096 * 2048  # 4·B·H·N²·D
    assert FULL.flops("backward") == 2.5 * forward
    assert FULL.flops("both") == 3.5 * forward


def test_a_run_has_every_shape_once() -> None:
    wanted = cases(PARTS)
    assert len(wanted) == len(set(wanted))
    assert {(c.dim, c.length, c.causal) for c in wanted if c.kind == "plain"} == {
        (dim, length, causal) for dim in DIMS for length in LENGTHS for causal in (False, True)
    }
    assert all(sum(case.packed) == case.length for case in wanted if case.packed)
    assert len(cases(["forward", "backward"], quick=True)) == 12
    assert {case.kind for case in cases(["kinds"], quick=True)} == {case.kind for case in cases(["kinds"])}


def test_twins_have_about_the_same_work_a_token() -> None:
    """Not the same: the first queries of a window see fewer keys, and packed lengths are mixed."""
    for case in cases(["kinds", "fp8"]):
        twin = case.twin
        if twin is None:
            assert case.kind in ("deterministic", FP16)
            continue
        assert twin.kind == "plain"
        assert twin.parts == case.parts
        each, other = (c.flops("forward") / c.batch / c.length for c in (case, twin))
        assert 0.7 < other / each < 1.15


def test_every_goal_can_be_met_and_missed() -> None:
    assert [v.met for v in judged(record(1.21))] == len(GOALS) * [True]
    slow = record(0.8)
    slow.fp8_rmse = 1e-2
    missed = {v.name for v in judged(slow) if not v.met}
    kept = {v.name for v in judged(slow) if v.met}
    assert "forward over cuDNN, least" in missed
    assert "deterministic backward over cuDNN's plain, least" in missed
    assert "FP8 RMSE on inputs with outliers" in missed
    assert kept == {v.name for v in judged(slow) if "plain, mean" in v.name or "bits" in v.name or "bf16" in v.name}


def test_what_was_not_measured_is_not_judged() -> None:
    assert {v.met for v in judged(empty())} == {None}


def test_least_and_mean() -> None:
    made = empty()
    for length, ours in ((4096, 2.0), (8192, 0.5)):
        made.points.append(point(replace(FULL, length=length), "forward", {OURS: 500 * ours, CUDNN: 500.0}))
    assert verdict(made, "forward over cuDNN, least") == (pytest.approx(0.5), False)
    assert verdict(made, "forward over cuDNN, mean") == (pytest.approx(1.0), False)
    assert verdict(made, "backward D 256 over cuDNN, least") == (None, None)


def test_ours_without_a_figure_is_a_miss_and_a_peer_without_one_is_not() -> None:
    made = empty()
    made.points.append(point(FULL, "forward", {CUDNN: 500.0}))
    assert verdict(made, "forward over cuDNN, mean") == (0.0, False)
    made.points[:] = [point(FULL, "forward", {OURS: 500.0})]
    assert verdict(made, "forward over cuDNN, mean") == (None, None)


def test_a_kind_is_held_against_its_twin_by_tflops() -> None:
    made = empty()
    window = replace(FULL, kind="window", length=16384, window=1024)
    made.points.append(point(window, "forward", {OURS: 570.0, PLAIN: 600.0}))
    assert verdict(made, "forward, window over plain, mean") == (pytest.approx(0.95), True)


def test_share_of_the_matmul_is_that_of_the_same_rounds() -> None:
    made = empty()
    for causal, matmul in ((False, 700.0), (True, 800.0)):
        long = replace(FULL, length=16384, causal=causal)
        made.points.append(replace(point(long, "forward", {OURS: 640.0}), matmul=matmul))
    assert verdict(made, "forward D 128, N 16384 over matmul, least") == (pytest.approx(0.8), False)


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([2.0, 0.0]) == 0.0


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made, path = record(), tmp_path / "deep" / "record.json"
    made.points[0] = replace(made.points[0], eager_ms={OURS: 1.5}, missing={CUDNN: "refused by torch"})
    made.write(path)
    assert read(path) == made
    assert [path] == list(path.parent.iterdir())  # nothing half-written beside it
    goals = json.loads(path.read_text(encoding="utf-8"))["goals"]
    assert [goal["name"] for goal in goals] == [goal.name for goal in GOALS]


@pytest.mark.parametrize("text", ["", "[]", '{"date": "2026"}', '{"date": 1, "environment": {}, "points": [{"a": 1}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"must be what bench_record\.py --json writes"):
        read(path)
