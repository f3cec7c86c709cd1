"""The rows of a study of pairs: what each run did at each step, and how far apart the pairs were."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from dataclasses import fields
from typing import Any

from assay.metrics.state_dicts import WeightDifference
from assay.results.environment import environment
from assay.results.record import Record
from assay.results.training_record import TRAINING
from assay.training.run import Progress, Run
from assay.training.training import Pair, PairStudy, Training, changes

_RUN = "run-"


def is_of_run(identity: str) -> bool:
    """Whether the row of that id is about one step of one training."""
    return identity.startswith(_RUN)


class Rows:
    """Makes the rows of one seed of a study."""

    def __init__(self, study: PairStudy, recipe: str, seed: int, device: str, alone: bool = True) -> None:
        self.study, self.seed, self._alone = study, seed, alone
        self._environment = environment(device)
        self._recipe = recipe
        self.identity = identity_of(study, seed, self._environment["device"])

    def of_run(self, name: str, run: Run, progress: Progress, held_out: float | None) -> Record:
        """One step of one run."""
        return self._row(
            (name, run.step),
            run,
            arm=name,
            kind="run",
            layer="",
            step=run.step,
            loss=progress.loss,
            held_out=held_out,
            grad_norm=progress.grad_norm,
            scale=progress.scale,
            skipped=len(run.skipped),
            step_seconds=progress.seconds if self._alone else None,
            seconds=progress.seconds,
        )

    def of_pair(self, pair: Pair, arm: Run, step: int, kind: str, found: WeightDifference, seconds: float) -> Record:
        """One layer of one pair at one step."""
        name, before, after = _changed(pair, self.study)
        return self._row(
            (pair.name, step, kind, found.name),
            arm,
            pair=pair.name,
            arm=pair.arm,
            reference=pair.reference,
            changed=name,
            changed_from=before,
            changed_to=after,
            kind=kind,
            layer=found.name,
            step=step,
            count=found.count,
            max=found.max,
            rmse=found.rmse,
            w1=found.wasserstein,
            std=found.reference_std,
            relative_rmse=found.relative_rmse,
            relative_w1=found.relative_wasserstein,
            seconds=seconds,
        )

    def _row(self, place: tuple[Any, ...], run: Run, **values: Any) -> Record:
        training = run.training
        row: Record = dict.fromkeys(TRAINING.columns)
        return row | {
            "schema": TRAINING.version,
            "id": (_RUN if values["kind"] == "run" else "") + _hash((self.identity, *place)),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            **self._environment,
            "recipe": self._recipe,
            "model": f"{training.task} {training.size}",
            "data": run.task.data,
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "attention": training.attention,
            "precision": str(training.precision),
            "optimizer": training.optimizer,
            "batch": training.batch * training.accumulate,
            "seed": self.seed,
            "steps": training.steps,
            **values,
        }


def identity_of(study: PairStudy, seed: int, device: str) -> str:
    """What decides the bits of all trainings of a study: the same for the same, on the same kind of device."""
    trainings = {name: _plain(training) for name, training in study.trainings.items()}
    pairs = [pair.name for pair in study.pairs]
    return _hash((trainings, pairs, study.every, seed, device))


def _plain(training: Training) -> dict[str, str]:
    values = {field.name: getattr(training, field.name) for field in fields(Training)}
    return {name: _name(value) for name, value in values.items()}


def _name(value: Any) -> str:
    """A function by its name: its code is not part of a row, nor is where in memory a callable lies."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def _changed(pair: Pair, study: PairStudy) -> tuple[str, str, str]:
    found = changes(study.trainings[pair.arm], study.trainings[pair.reference])
    before, after = (", ".join(_name(values[side]) for values in found.values()) for side in (0, 1))
    return ", ".join(found), before, after


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
