"""Where a loss that is no number began: the first place of the model that gave one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Diverged(Exception):
    """The loss of a training is no number any more."""

    def __init__(self, step: int, loss: float, where: str) -> None:
        super().__init__(f"its loss was {loss} at step {step + 1}; {where}")
        self.step, self.loss, self.where = step, loss, where


@torch.no_grad()
def where_it_began(model: nn.Module, compute: Callable[[], object]) -> str:
    """In words; `compute` runs the model again on the batch that went wrong."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the weights {name} were not finite already"
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple | list) else (output,)
            if not found and any(isinstance(x, Tensor) and not x.isfinite().all() for x in outputs):
                found.append(name)

        return hook

    named = ((name or "the output", module) for name, module in model.named_modules())
    hooks = [module.register_forward_hook(look(name)) for name, module in named]
    try:
        compute()
    finally:
        for handle in hooks:
            handle.remove()
    return f"it began in {found[0]}" if found else "no layer gave it: it began in the loss itself"
