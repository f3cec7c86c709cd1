"""How the cost of a sweep grows with its points, and what a second process brings.

    python benchmarks/bench_sweeps.py

Beside the same points measured by a bare loop, with no folder, no claims and no records. Exits with 1 if a goal
is missed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from assay.executors.local import cores
from assay.sweeps.grid import default_sweep
from assay.sweeps.measure import Bench
from assay.sweeps.point import Point
from assay.sweeps.run import run_points

LINEAR = 1.15
"""Seconds a point with four times the points, over those with one times, at most."""
OVERHEAD = 1.05
"""Seconds of a sweep over those of the bare loop, at most."""
SPEEDUP = 0.8
"""Of one process a core over one process of one thread, as a share of the cores, at least; start included."""


def points(seeds: int) -> list[Point]:
    return default_sweep("inputs", seeds=seeds).points("cpu")


def swept(grid: list[Point], jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run_points(grid, Path(folder), "cpu", jobs)
        return time.perf_counter() - start


def bare(grid: list[Point]) -> float:
    start = time.perf_counter()
    bench, group = None, ""
    for point in grid:
        if bench is None or point.group != group:
            bench, group = Bench(point, "cpu"), point.group
        bench.measure(point)
    return time.perf_counter() - start


def main() -> int:
    torch.set_num_threads(1)  # what a worker has where there is one for each core
    few, many = points(5), points(20)
    bare(few[:10])
    # In turn, so that a slow moment of the machine strikes both.
    pairs = [(swept(few, 1), bare(few)) for _ in range(3)]
    one, loop = (min(side) for side in zip(*pairs, strict=True))
    four, several = swept(many, 1), swept(many, cores())
    growth, overhead = four / len(many) / (one / len(few)), one / loop
    print(f"{torch.__version__}, {cores()} cores; (1, 2, 1024, 64), bf16, 18 points a seed")
    print(f"{len(few)} points, bare loop:       {loop:6.1f} s")
    print(f"{len(few)} points, a sweep:         {one:6.1f} s   {overhead:.3f} of the loop (at most {OVERHEAD})")
    print(f"{len(many)} points, a sweep:        {four:6.1f} s   {growth:.3f} a point (at most {LINEAR})")
    speedup, goal = four / several, SPEEDUP * cores()
    print(f"{len(many)} points, {cores()} processes:  {several:6.1f} s   {speedup:.2f}× (at least {goal:.1f})")
    good = growth <= LINEAR and overhead <= OVERHEAD and speedup >= goal
    print("met" if good else "MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
