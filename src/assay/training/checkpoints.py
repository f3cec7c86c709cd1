"""Trainings on disk, to go on with: all of a group at the same step, in one folder that is there whole or not at all.

Tensors are safetensors, numbers JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from assay.training.run import Run

_NUMBERS = "numbers.json"


def save(folder: Path, runs: dict[str, Run], identity: str) -> None:
    """Replace what was saved before. `identity` says what they are trainings of."""
    step = max(run.step for run in runs.values())
    folder.mkdir(parents=True, exist_ok=True)
    new, target = folder / f".new-{os.getpid()}", folder / f"step-{step}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    numbers = {"identity": identity, "runs": {}}
    for number, (name, run) in enumerate(runs.items()):
        tensors = {key: value.contiguous() for key, value in run.tensors()}
        save_file(tensors, new / f"{number}.safetensors")
        numbers["runs"][name] = run.numbers()  # type: ignore[index]
    (new / _NUMBERS).write_text(json.dumps(numbers), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(new, target)
    for other in folder.iterdir():
        if other != target and other.is_dir():
            shutil.rmtree(other, ignore_errors=True)


def size(run: Run) -> int:
    """Bytes that its tensors take, about: the optimizer's come with its first step."""
    return 4 * sum(p.nbytes for p in run.model.parameters())


def load(folder: Path, runs: dict[str, Run], identity: str) -> bool:
    """Restore the trainings; False where nothing was saved. Another study's checkpoint is a ValueError."""
    saved = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    if not saved:
        return False
    latest = saved[-1]
    numbers: dict[str, Any] = json.loads((latest / _NUMBERS).read_text(encoding="utf-8"))
    if numbers["identity"] != identity or list(numbers["runs"]) != list(runs):
        raise ValueError(of_others(latest))
    for number, (name, run) in enumerate(runs.items()):
        with safe_open(latest / f"{number}.safetensors", framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in list(file.keys())}
            run.restore(tensors, numbers["runs"][name])
    return True


def of_others(path: Path) -> str:
    """Why what is there is of no use."""
    return f"{path} is of other trainings (another model, other data or settings). Name another folder with --out."
