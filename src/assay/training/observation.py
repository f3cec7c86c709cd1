"""What is compared of two trainings: weights, gradients, optimizer state, activations on a fixed probe."""

from __future__ import annotations

import math
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


def observe(run: Run) -> tuple[float, Observation]:
    """After a step: the loss on the probe, and all that is compared. Only the probe's activations are computed."""
    named = list(run.model.named_parameters())
    held_out, activations = _on_probe(run)
    return held_out, {
        "weights": {name: p.detach() for name, p in named},
        "gradients": {name: p.grad for name, p in named if p.grad is not None},
        "optimizer": {name: value for name, value in states(run.model, run.optimizers) if value.numel() > 1},
        "activations": activations,
    }


@torch.no_grad()
def _on_probe(run: Run) -> tuple[float, dict[str, Tensor]]:
    """The loss on data that is not trained on, and the outputs of the layers."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_hook(lambda _, __, output: found.__setitem__(name, output.detach()))

    hooks = [keep(name, module) for name, module in layers(run.model)]
    try:
        held_out = float(run.task.loss(run.model, run.on_device(run.task.probe())))
    finally:
        for hook in hooks:
            hook.remove()
    return held_out, found


class Known:
    """What several pairs ask of the same tensor, computed once: its values in order, and their spread."""

    def __init__(self) -> None:
        self._ordered: dict[int, Tensor] = {}
        self._spread: dict[int, Tensor] = {}

    def ordered(self, x: Tensor) -> Tensor:
        """Ascending, in FP32."""
        if id(x) not in self._ordered:
            self._ordered[id(x)] = sorted_values(_flat(x))
        return self._ordered[id(x)]

    def spread(self, x: Tensor) -> Tensor:
        """The standard deviation, in FP64."""
        if id(x) not in self._spread:
            self._spread[id(x)] = _flat(x).std(unbiased=False).double()
        return self._spread[id(x)]


@torch.no_grad()
def differences(
    arm: Mapping[str, Tensor], reference: Mapping[str, Tensor], known: Known | None = None
) -> list[WeightDifference]:
    """All layers as one (""), then each that both have in one shape. Not finite where a tensor is not.

    Share `known` between pairs whose tensors are the same and do not change in between. All layers at once, so that
    nothing waits for the device layer by layer; and tensors that are equal are not sorted.
    """
    known = known or Known()
    names = [name for name in reference if name in arm and arm[name].shape == reference[name].shape]
    if not names:
        return []
    pairs = [(arm[name], reference[name]) for name in names]
    gaps = torch._foreach_sub([_flat(a) for a, _ in pairs], [_flat(b) for _, b in pairs])
    most, squares, spread = (
        torch.stack(figures).tolist()
        for figures in (_norms(gaps, torch.inf), _norms(gaps, 2), tuple(known.spread(b) for _, b in pairs))
    )
    del gaps
    apart = [i for i, gap in enumerate(squares) if gap != 0 and math.isfinite(gap)]
    w1 = [0.0 if gap == 0 else math.nan for gap in squares]
    if apart:
        shifts = torch._foreach_sub(
            [known.ordered(pairs[i][0]) for i in apart], [known.ordered(pairs[i][1]) for i in apart]
        )
        for i, total in zip(apart, torch.stack(_norms(shifts, 1)).tolist(), strict=True):
            w1[i] = total / pairs[i][1].numel()
    found = [
        WeightDifference(
            name=name,
            count=b.numel(),
            max=math.nan if math.isnan(gap) else largest,  # a norm of infinite order may pass over NaN
            rmse=gap / math.sqrt(b.numel()),
            wasserstein=distance,
            reference_std=std,
        )
        for name, (_, b), largest, gap, distance, std in zip(names, pairs, most, squares, w1, spread, strict=True)
    ]
    return [combine("", found), *found]


def _flat(x: Tensor) -> Tensor:
    return x.detach().float().flatten()


def _norms(tensors: tuple[Tensor, ...] | list[Tensor], order: float) -> tuple[Tensor, ...]:
    """Of each, added up in FP64."""
    return tuple(torch._foreach_norm(tensors, order, torch.float64))
