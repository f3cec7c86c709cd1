"""Observations on disk, for trainings that do not fit into memory together."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from assay._files import write_whole
from assay.models.arithmetic import Arithmetic
from assay.training.attention import find_attention
from assay.training.observation import KINDS, Observation
from assay.training.tasks import find_task
from assay.training.training import Training

_BYTES = 4 + 4 + 8 + 4
"""Of a parameter: weight, gradient, optimizer, average."""
_SHARE = 0.6
"""Of the free memory; the rest is for activations."""


def fits(trainings: Mapping[str, Training], device: torch.device) -> bool:
    """Whether all trainings fit into the device's free memory at once."""
    needed = sum(_parameters(training) * _BYTES for training in trainings.values())
    return needed <= _SHARE * _free(device)


def _parameters(training: Training) -> int:
    task = find_task(training)
    with torch.device("meta"):
        model = task.model(find_attention("sdpa"), Arithmetic(), 0)
    return sum(p.numel() for p in model.parameters())


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system tells
        return 2**33


def save(folder: Path, name: str, step: int, observation: Observation) -> None:
    """Whole or not at all."""
    tensors = {f"{kind} {key}": value.cpu().contiguous() for kind in KINDS for key, value in observation[kind].items()}
    path = _path(folder, name, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    save_file(tensors, scratch)  # straight to the disk: memory is what there is too little of
    os.replace(scratch, path)


def load(folder: Path, name: str, step: int) -> Observation | None:
    """None where the training did not come so far."""
    path = _path(folder, name, step)
    if not path.is_file():
        return None
    found: Observation = {kind: {} for kind in KINDS}
    for key, value in load_file(path).items():
        kind, _, rest = key.partition(" ")
        found[kind][rest] = value
    return found


def save_skips(folder: Path, name: str, steps: list[int]) -> None:
    """The steps that a training skipped, for the one that skips like it."""
    write_whole(folder / f"{safe_name(name)}.json", json.dumps(steps).encode())


def load_skips(folder: Path, name: str) -> list[int]:
    """See `save_skips`; none where the training ended before its first step."""
    path = folder / f"{safe_name(name)}.json"
    found: list[int] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return found


def safe_name(name: str) -> str:
    """As a file may be called, another for every name."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '_', name)[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _path(folder: Path, name: str, step: int) -> Path:
    return folder / safe_name(name) / f"step-{step}.safetensors"
