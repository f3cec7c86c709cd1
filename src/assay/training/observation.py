"""What is compared of two trainings: weights, gradients, optimizer state, activations on a fixed probe."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from assay.metrics.sorted_runs import sorted_values
from assay.metrics.state_dicts import WeightDifference, combine
from assay.training.optimizers import states
from assay.training.run import Run
from assay.training.tasks import layers

KINDS = ("weights", "gradients", "optimizer", "activations")
Observation = dict[str, dict[str, Tensor]]
"""Kind → name → tensor, as they are in the run: to be compared or copied before it goes on."""


def observe(run: Run) -> Observation:
    """After a step: all but the activations without computing anything."""
    named = list(run.model.named_parameters())
    return {
        "weights": {name: p.detach() for name, p in named},
        "gradients": {name: p.grad for name, p in named if p.grad is not None},
        "optimizer": {name: value for name, value in states(run.model, run.optimizers) if value.numel() > 1},
        "activations": _activations(run),
    }


@torch.no_grad()
def _activations(run: Run) -> dict[str, Tensor]:
    """The outputs of the layers on the probe."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_hook(lambda _, __, output: found.__setitem__(name, output.detach()))

    hooks = [keep(name, module) for name, module in layers(run.model)]
    try:
        run.task.loss(run.model, run.on_device(run.task.probe()))
    finally:
        for hook in hooks:
            hook.remove()
    return found


class Sorted:
    """The values of tensors in order, each sorted once for all pairs that it is in."""

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}

    def of(self, x: Tensor, flat: Tensor) -> Tensor:
        """Of a tensor, and the same flat in FP32."""
        if id(x) not in self._known:
            self._known[id(x)] = sorted_values(flat)
        return self._known[id(x)]


def differences(
    arm: Mapping[str, Tensor], reference: Mapping[str, Tensor], ordered: Sorted | None = None
) -> list[WeightDifference]:
    """All layers as one (""), then each that both have in one shape. Not finite where a tensor is not.

    Share `ordered` between pairs whose tensors are the same and do not change in between.
    """
    ordered = ordered or Sorted()
    names = [name for name in reference if name in arm and arm[name].shape == reference[name].shape]
    if not names:
        return []
    figures = torch.stack([_figures(arm[name], reference[name], ordered) for name in names]).tolist()
    found = [
        WeightDifference(
            name=name, count=reference[name].numel(), max=most, rmse=rmse, wasserstein=w1, reference_std=std
        )
        for name, (most, rmse, w1, std) in zip(names, figures, strict=True)
    ]
    return [combine("", found), *found]


@torch.no_grad()
def _figures(arm: Tensor, reference: Tensor, ordered: Sorted) -> Tensor:
    """Max, RMSE, W1 and the reference's spread: on the device, so that nothing waits for it layer by layer."""
    a, b = arm.detach().float().flatten(), reference.detach().float().flatten()
    gap = a - b
    most = gap.abs().max().double()
    w1 = (ordered.of(arm, a).double() - ordered.of(reference, b)).abs().mean()
    return torch.stack(
        (
            most,
            gap.square().mean(dtype=torch.float64).sqrt(),
            torch.where(most.isfinite(), w1, torch.nan),
            b.std(unbiased=False).double(),
        )
    )
