"""Trainings of a few thousand parameters, studies of them, and what two folders of results must share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.models.gpt import GptConfig
from assay.models.text_to_image import TextToImageConfig
from assay.results.lines import all_records
from assay.results.record import Record
from assay.results.training_record import TRAINING
from assay.training.precision import POLICIES
from assay.training.run import Run
from assay.training.tasks import find_task
from assay.training.training import Pair, PairStudy, Training

IMAGES = TextToImageConfig(image=8, patch=4, words=64, caption=4, width=16, depth=1, heads=2)
TOKENS = GptConfig(context=16, width=16, depth=2, heads=2, kv_heads=1)
BASE = Training(size="dot", data="synthetic", image=8, context=16, steps=6, batch=4, warmup=2, average=0.9)
TEXT = replace(BASE, task="gpt")
SKIPPING = POLICIES["fp16"].replace(loss_scale=800_000.0)
"""Some steps of `BASE` overflow with it, others do not, and it stays."""
VARYING = ("time", "step_seconds", "seconds", "code")
"""What no two measurements share; and the code, which is the commit and whether somebody edits it."""


def new_run(training: Training = BASE) -> Run:
    return Run(training, find_task(training), torch.device("cpu"))


def trained(training: Training = BASE, steps: int | None = None) -> Run:
    run = new_run(training)
    for _ in range(training.steps if steps is None else steps):
        run.advance()
    return run


def control_study(base: Training = BASE, seeds: tuple[int, ...] = (0,), every: int = 2) -> PairStudy:
    """A null pair, low precision whose scale moves, and who skips its steps too."""
    low = replace(base, precision="fp16")
    trainings = {
        "base": base,
        "again": base,
        "fp16": low,
        "fp32": replace(base, precision="fp32"),
        "like fp16": replace(base, precision="fp32", skips_like="fp16"),
    }
    pairs = (
        Pair(name="null", arm="again", reference="base", several=True),
        Pair(name="low", arm="fp16", reference="base"),
        Pair(name="skipped", arm="like fp16", reference="fp32"),
    )
    return PairStudy(asked="Why?", trainings=trainings, pairs=pairs, seeds=seeds, every=every)


def rows_of(folder: Path) -> list[Record]:
    return all_records(folder, TRAINING)


def figures(rows: list[Record]) -> dict[str, dict[str, Any]]:
    """By id: everything that the bits of the trainings decide."""
    return {row["id"]: {key: repr(value) for key, value in row.items() if key not in VARYING} for row in rows}


def state(run: Run) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.tensors()}


def digests(folder: Path) -> dict[str, str]:
    """Of the weights that the trainings of seed 0 came to."""
    found: dict[str, str] = json.loads((folder / "ended" / "seed-0.json").read_text(encoding="utf-8"))["weights"]
    return found


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
