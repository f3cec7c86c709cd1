"""The trainings of a study, one seed at a time: side by side in memory, or one after the other through snapshots.

Whatever stops it, the same call goes on: rows are appended as they are measured, and the trainings are saved now and
then. What was trained after the last save is trained again, to the same bits.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from assay._files import write_whole
from assay.executors.local import run_tasks
from assay.results.record import Record
from assay.results.store import Store
from assay.results.training_record import TRAINING
from assay.training import checkpoints, snapshots
from assay.training.blame import Diverged
from assay.training.determinism import deterministic
from assay.training.events import Events
from assay.training.observation import KINDS, Known, Observation, differences, observe
from assay.training.rows import Rows, is_of_run
from assay.training.run import Run
from assay.training.samples import save_samples
from assay.training.tasks import find_task
from assay.training.training import Pair, PairStudy

SAVE_EVERY = 60.0
"""Seconds from one save to the next, at least."""
SAVE_SHARE = 1 / 20
"""Of the time, for saving: large models take long to write."""
SLOW_DISK = 200e6
"""Bytes a second, until a save has been timed."""
Tell = Callable[[int, str], None]
"""Told now and then: how many steps of all trainings are done, and what the last one was like, if that is known."""


class Outcome(NamedTuple):
    """How a study ended."""

    finished: bool
    """False if time ran out: the same call goes on."""
    stopped: dict[str, str]
    """Trainings that ended early, "name, seed 1", and why."""
    apart: bool
    """Whether they ran one after the other, for want of memory."""


class _Task(NamedTuple):
    """One seed, as a worker takes it."""

    study: PairStudy
    seed: int
    folder: Path
    device: str
    recipe: str
    deadline: float | None
    tensorboard: bool
    alone: bool
    """Whether no other seed shares the device: only then are its times its own."""


def run_pairs(
    study: PairStudy,
    folder: Path,
    device: str,
    *,
    recipe: str = "",
    seconds: float | None = None,
    jobs: int = 1,
    tensorboard: bool = False,
    tell: Tell = lambda done, words: None,
) -> Outcome:
    """Train what `folder` lacks of the study, `jobs` seeds at a time; with `seconds`, for about so long, then save.

    `tensorboard` writes its events too, into a folder of that name.
    """
    deadline = None if seconds is None else time.time() + seconds
    if any(training.change is not None for training in study.trainings.values()):
        jobs = 1  # a function of the user's cannot go to another process
    alone = device == "cpu" or jobs == 1 or len(study.seeds) == 1
    tasks = [_Task(study, seed, folder, device, recipe, deadline, tensorboard, alone) for seed in study.seeds]
    with Store(folder, TRAINING) as store:
        here = _Here(store, tell)
        function = here.train if jobs == 1 or len(tasks) == 1 else _train
        found = [outcome for _, outcome in run_tasks(function, tasks, jobs, here.look)]
    stopped = {name: why for outcome in found for name, why in outcome.stopped.items()}
    return Outcome(all(o.finished for o in found), stopped, any(o.apart for o in found))


class _Here:
    """Trains in this process, or looks on while others do."""

    def __init__(self, store: Store, tell: Tell) -> None:
        self.store, self.tell, self.in_time = store, tell, True
        self.done = sum(map(is_of_run, store.done))
        tell(self.done, "")

    def look(self) -> None:
        """Count the steps that workers have written."""
        self.done += sum(map(is_of_run, self.store.refresh()))
        self.tell(self.done, "")

    def train(self, task: _Task) -> Outcome:
        """Nothing once time ran out in a seed before: every step of another would come too late."""
        outcome = _train(task, self.store, self._told) if self.in_time else Outcome(False, {}, False)
        self.in_time = outcome.finished
        return outcome

    def _told(self, words: str) -> None:
        self.done += 1
        self.tell(self.done, words)


def _train(task: _Task, store: Store | None = None, told: Callable[[str], None] = lambda words: None) -> Outcome:
    with deterministic():  # the rows too: they say how many threads there were
        rows = Rows(task.study, task.recipe, task.seed, task.device, task.alone)
        if store is not None:
            return Session(task, rows, store, told).outcome()
        with Store(task.folder, TRAINING) as own:
            return Session(task, rows, own, told).outcome()


def _steps(study: PairStudy) -> int:
    return next(iter(study.trainings.values())).steps


class Session:
    """One seed of a study."""

    def __init__(self, task: _Task, rows: Rows, store: Store, told: Callable[[str], None]) -> None:
        folder = task.folder
        self.study, self.rows, self.store, self.deadline, self.told = task.study, rows, store, task.deadline, told
        self.events = Events(folder / "tensorboard") if task.tensorboard else None
        self.trainings = {name: t.reseeded(rows.seed) for name, t in task.study.trainings.items()}
        self.device = torch.device(task.device)
        self.samples = folder / "samples"
        self.saves = folder / "checkpoints" / f"seed-{rows.seed}"
        self.snapshots = folder / "snapshots" / f"seed-{rows.seed}"
        self.end = folder / "ended" / f"seed-{rows.seed}.json"
        self.stopped: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        """Of the weights that the trainings came to."""
        self._seen: dict[str, Observation] = {}
        self.apart = not snapshots.fits(self.trainings, self.device)

    def outcome(self) -> Outcome:
        """Train, and say how it went."""
        finished = self.run()
        if self.events is not None:
            self.events.flush()
        return Outcome(finished, {f"{n}, seed {self.rows.seed}": why for n, why in self.stopped.items()}, self.apart)

    def run(self) -> bool:
        """Whether it came to its end. What has ended is not loaded again."""
        stopped = self._ended()
        if stopped is not None:
            self.stopped = stopped
            return True
        groups = [[name] for name in self._order()] if self.apart else [self._order()]
        for group in groups:
            runs = {name: Run(self.trainings[name], find_task(self.trainings[name]), self.device) for name in group}
            if not self._train(runs):
                return False
        if self.apart:
            self._compare_snapshots()
        ended = {"identity": self.rows.identity, "stopped": self.stopped, "weights": self.digests}
        write_whole(self.end, json.dumps(ended).encode())
        for folder in (self.saves, self.snapshots):  # gigabytes, of no use any more
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def _ended(self) -> dict[str, str] | None:
        try:
            found = json.loads(self.end.read_text(encoding="utf-8"))
            identity, stopped = found["identity"], dict(found["stopped"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if identity != self.rows.identity:
            raise ValueError(checkpoints.of_others(self.end))
        return stopped

    def _order(self) -> list[str]:
        """Whoever skips like another comes after it."""
        return sorted(self.trainings, key=lambda name: self.trainings[name].skips_like is not None)

    def _train(self, runs: dict[str, Run]) -> bool:
        place = self.saves / snapshots.safe_name("-".join(runs)) if self.apart else self.saves
        checkpoints.load(place, runs, self.rows.identity)
        self._stop_again(runs)
        saved, steps = time.monotonic(), _steps(self.study)
        took = sum(checkpoints.size(run) for run in runs.values()) / SLOW_DISK
        while (step := max(run.step for run in runs.values())) < steps and not self.stopped.keys() >= runs.keys():
            for name, run in runs.items():
                if name not in self.stopped:
                    self._advance(name, run, runs, step)
            if self._compared_at(step + 1):
                self._look(runs, step + 1)
            late = self.deadline is not None and time.time() > self.deadline
            due = time.monotonic() - saved > max(SAVE_EVERY, took / SAVE_SHARE)
            if late or due or (self.apart and step + 1 == steps):
                began = time.monotonic()
                checkpoints.save(place, runs, self.rows.identity)
                saved = time.monotonic()
                took = saved - began
            if late and step + 1 < steps:
                return False
        self.digests |= {name: run.digest() for name, run in runs.items() if name not in self.stopped}
        if self.rows.seed == self.study.seeds[0]:
            save_samples(self.samples, self._shown(runs), self.rows.seed)
        return True

    def _shown(self, runs: dict[str, Run]) -> dict[str, Run]:
        """Of which samples are drawn: the first few that are not the same training again."""
        whole = [(name, run) for name, run in runs.items() if name not in self.stopped]
        return {n: r for i, (n, r) in enumerate(whole) if all(r.training != o.training for _, o in whole[:i])}

    def _stop_again(self, runs: dict[str, Run]) -> None:
        """Trainings that were stopped before the save are behind the others: their next step says why once more."""
        for name, run in runs.items():
            if run.step < max(other.step for other in runs.values()):
                self._advance(name, run, runs, run.step)

    def _advance(self, name: str, run: Run, runs: dict[str, Run], step: int) -> None:
        leader = run.training.skips_like
        try:
            progress = run.advance(skip=leader is not None and step in self._skips(leader, runs))
        except Diverged as error:
            self.stopped[name] = str(error)
            return
        held_out = None
        if self._compared_at(run.step):
            held_out, self._seen[name] = observe(run)
        new = self._keep([self.rows.of_run(name, run, progress, held_out)])
        if self.apart:
            snapshots.save_skips(self.snapshots, name, run.skipped)
        if new:
            self.told(f"{name}: loss {progress.loss:.3f}, {1 / max(progress.seconds, 1e-9):.1f} steps/s")

    def _skips(self, leader: str, runs: dict[str, Run]) -> list[int]:
        return runs[leader].skipped if leader in runs else snapshots.load_skips(self.snapshots, leader)

    def _compared_at(self, step: int) -> bool:
        return step == 1 or step % self.study.every == 0 or step == _steps(self.study)

    def _look(self, runs: dict[str, Run], step: int) -> None:
        seen, self._seen = self._seen, {}
        if self.apart:
            for name, observation in seen.items():
                snapshots.save(self.snapshots, name, step, observation)
        else:
            self._compare(seen, runs, step)

    def _compare(self, seen: dict[str, Observation], runs: dict[str, Run], step: int) -> None:
        pairs = [pair for pair in self.study.pairs if pair.arm in seen and pair.reference in seen]
        for kind in KINDS:
            known = Known()  # of one kind at a time: memory
            for pair in pairs:
                one, other = seen[pair.arm][kind], seen[pair.reference][kind]
                self._keep(self._differences(pair, runs[pair.arm], step, kind, one, other, known))

    def _differences(
        self,
        pair: Pair,
        arm: Run,
        step: int,
        kind: str,
        one: dict[str, Tensor],
        other: dict[str, Tensor],
        known: Known | None = None,
    ) -> Iterable[Record]:
        began = time.perf_counter()
        found = differences(one, other, known)
        seconds = (time.perf_counter() - began) / max(1, len(found))
        for difference in found:
            yield self.rows.of_pair(pair, arm, step, kind, difference, seconds)

    def _compare_snapshots(self) -> None:
        for pair in self.study.pairs:
            arm = Run(self.trainings[pair.arm], find_task(self.trainings[pair.arm]), torch.device("cpu"))
            for step in range(1, _steps(self.study) + 1):
                if self._compared_at(step):
                    one, other = (snapshots.load(self.snapshots, name, step) for name in (pair.arm, pair.reference))
                    if one is not None and other is not None:
                        for kind in KINDS:
                            self._keep(self._differences(pair, arm, step, kind, one[kind], other[kind]))

    def _keep(self, rows: Iterable[Record]) -> int:
        """How many of them are new; a step that is trained again has its rows already."""
        new = [row for row in rows if row["id"] not in self.store.done]
        for row in new:
            self.store.append(row)
            if self.events is not None:
                self.events.add(row)
        return len(new)
