"""Run a grid into a folder: what is there already is not measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from assay.executors.local import run_tasks
from assay.results.environment import environment
from assay.results.store import Store
from assay.sweeps.measure import Bench, NotTakenError
from assay.sweeps.point import Point


@dataclass(frozen=True, slots=True)
class _Task:
    """The points of one group that are not in the folder yet."""

    folder: Path
    device: str
    group: str
    points: tuple[Point, ...]
    ids: tuple[str, ...]
    wait: bool = False
    """Whether to wait for another process that is at this group."""


def run_points(
    points: Sequence[Point],
    folder: Path,
    device: str,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Measure what `folder` lacks of `points`; tells `progress` how many of how many are there. The ids of all.

    Each point is written when it is measured, so that whoever stops this, by Ctrl-C or kill -9, loses the point in
    flight and no other. Another process may work on the same points in the same folder: groups are claimed. A real
    kernel that does not take its inputs leaves no record.
    """
    name = environment(device)["device"]
    with Store(folder) as store:
        ids = [point.id(name) for point in points]
        missing = set(ids) - store.done
        total = len(set(ids))

        def tell(found: Iterable[str]) -> None:
            missing.difference_update(found)
            progress(total - len(missing), total)

        tell(())
        tasks = _tasks(zip(points, ids, strict=True), store.done, folder, device)
        # In this process the store is at hand: progress after every point instead of every group.
        here = _Worker(store, tell)
        function = here.measure if jobs == 1 or len(tasks) <= 1 else _measure_in_worker
        while tasks:
            taken = [task for task, mine in run_tasks(function, tasks, jobs, lambda: tell(store.refresh())) if not mine]
            # What another process was at: by the time it is our turn it is done, or its process has died.
            tasks = [replace(task, wait=True) for task in taken]
        tell(store.refresh())
    return ids


def _tasks(points: Iterable[tuple[Point, str]], done: set[str], folder: Path, device: str) -> list[_Task]:
    groups: dict[str, dict[str, Point]] = {}
    for point, key in points:
        if key not in done:
            groups.setdefault(point.group, {})[key] = point
    return [_Task(folder, device, group, tuple(found.values()), tuple(found)) for group, found in groups.items()]


class _Worker:
    """Measures groups into one store."""

    def __init__(self, store: Store, tell: Callable[[Iterable[str]], None] = lambda ids: None) -> None:
        self.store, self.tell = store, tell

    def measure(self, task: _Task) -> bool:
        """Whether the group is done; False where another process is at it."""
        with self.store.claim(task.group, wait=task.wait) as mine:
            if not mine:
                return False
            self.tell(self.store.refresh())  # another process may have just finished it
            bench: Bench | None = None
            for point, key in zip(task.points, task.ids, strict=True):
                if key not in self.store.done:
                    bench = bench or Bench(point, task.device)
                    with suppress(NotTakenError):
                        self.store.append(bench.measure(point))
                    self.tell((key,))
        return True


_workers: dict[Path, _Worker] = {}  # of a worker process: its store stays open from task to task


def _measure_in_worker(task: _Task) -> bool:
    if task.folder not in _workers:
        _workers[task.folder] = _Worker(Store(task.folder))
    return _workers[task.folder].measure(task)
