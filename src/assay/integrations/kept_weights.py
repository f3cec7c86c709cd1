"""Weights of a training on disk: safetensors, `step-100.safetensors`, each there whole or not at all."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from assay.metrics.deviation import deviation
from assay.metrics.state_dicts import StateDictComparison, combine, compare_state_dicts

_FILE = re.compile(r"step-(\d+)\.safetensors")


def compare(weights: Mapping[str, Tensor], path: Path) -> StateDictComparison:
    """With those in a file, of which one tensor is in memory at a time."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != weights.keys():
            apart = sorted(names ^ weights.keys())
            raise ValueError(
                f"{path} must hold the weights of the same model, but {len(apart)} names are in one of the two only, "
                f"such as {apart[0]}. Were both built from the same configuration?"
            )
        layers = tuple(
            compare_state_dicts({name: mine}, {name: file.get_tensor(name).to(mine.device)}).layers[0]
            for name, mine in weights.items()
        )
    return StateDictComparison(layers=layers, combined=combine("combined", layers), skipped=(), p=1)


def moved(start: Path, now: Path) -> float:
    """The root mean square of the way from one file's weights to the other's."""
    with safe_open(start, framework="pt") as before, safe_open(now, framework="pt") as after:
        found = [
            deviation(after.get_tensor(name), before.get_tensor(name), quantiles=()) for name in list(after.keys())
        ]
    return math.sqrt(math.fsum(d.count * d.rmse**2 for d in found) / sum(d.count for d in found))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters; under their own names also if the model is compiled."""
    named = {name.replace("_orig_mod.", ""): p.detach() for name, p in model.named_parameters()}
    found = {name: p for name, p in named.items() if p.is_floating_point() and p.numel()}
    sharded = any(hasattr(p, "full_tensor") or "_fsdp_wrapped_module" in name for name, p in found.items())
    if sharded or not found:
        raise ValueError(
            f"WeightDeviation needs the whole weights in one process, but those of {type(model).__name__} are in "
            "shards, or there are none. Train it without FSDP and ZeRO, or leave WeightDeviation out."
        )
    return found


def steps_in(folder: Path) -> dict[int, Path]:
    """Step → its file."""
    found = ((_FILE.fullmatch(path.name), path) for path in folder.glob("step-*.safetensors"))
    return {int(match[1]): path for match, path in found if match}


def save(folder: Path, step: int, weights: Mapping[str, Tensor]) -> None:
    """Whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".step-{step}-{os.getpid()}"
    try:
        save_file({name: _alone(p.cpu().contiguous()) for name, p in weights.items()}, scratch)
        os.replace(scratch, folder / f"step-{step}.safetensors")
    finally:
        scratch.unlink(missing_ok=True)


def _alone(x: Tensor) -> Tensor:
    """Not part of a larger one, which a file may not hold."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()
