"""Running a grid: resumed, in several processes, stopped in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.results.lines import records_of
from assay.sweeps.grid import Sweep, default_sweep
from assay.sweeps.measure import Bench
from assay.sweeps.run import run_points

SMALL: dict[str, object] = {"length": 64, "dim": 16, "sram": 640, "seeds": 3, "plans": ("uniform", "shipped")}


def small() -> Sweep:
    return default_sweep("inputs", **SMALL, inputs=("uniform", "normal"))


def lines(folder: Path) -> list[str]:
    return [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = small().points("cpu")
    seen: list[tuple[int, int]] = []
    run_points([*points[:5], points[0]], tmp_path, "cpu", progress=lambda *told: seen.append(told))
    assert len(lines(tmp_path)) == 5
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (5, 5)
    ids = run_points(points, tmp_path, "cpu")
    assert len(lines(tmp_path)) == len(points) == 12
    assert [record["id"] for record in records_of(tmp_path, ids)] == ids
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("measured again"))
    assert run_points(points, tmp_path, "cpu") == ids


def test_several_processes_measure_the_same(tmp_path: Path) -> None:
    points = small().points("cpu")
    here, there = tmp_path / "one", tmp_path / "two"
    ids = run_points(points, here, "cpu", jobs=1)
    assert run_points(points, there, "cpu", jobs=2) == ids
    assert len(lines(there)) == len(points)
    changing = {"time", "seconds", "threads"}
    for a, b in zip(records_of(here, ids), records_of(there, ids), strict=True):
        assert {k: v for k, v in a.items() if k not in changing} == {k: v for k, v in b.items() if k not in changing}


def test_stopped_in_the_middle_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = small().points("cpu")
    measure, calls = Bench.measure, []

    def stop(bench: Bench, point: object) -> object:
        calls.append(point)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(bench, point)  # type: ignore[arg-type]

    monkeypatch.setattr(Bench, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        run_points(points, tmp_path, "cpu")
    assert len(lines(tmp_path)) == 3
    ids = run_points(points, tmp_path, "cpu")
    assert len(calls) == 4 + len(points) - 3
    assert len(records_of(tmp_path, ids)) == len(points)
