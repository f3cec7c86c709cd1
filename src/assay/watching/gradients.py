"""The gradients of one caught call, gathered while the backward pass goes by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from assay.watching.adapters import Adapter, FunctionAdapter

Told = Callable[[Tensor, dict[str, Tensor]], None]
"""Given the gradient of the output, and those of the inputs by their names."""


def own_views(
    adapter: Adapter | FunctionAdapter, arguments: Mapping[str, Any], names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Views of these arguments through which only this call's gradients flow.

    None where two are one tensor: its gradients would be added up in another order. Attention computes all three if
    one is wanted, so the others are wanted here; a function of the user's may do otherwise.
    """
    made = adapter.views(dict(arguments))
    if made is not None:
        return made
    found = {name: arguments[name] for name in names}
    wanted = [x.requires_grad for x in found.values()]
    if len({id(x) for x in found.values()}) < len(found):
        return {}
    if isinstance(adapter, Adapter) and any(wanted):
        one = next(x for x in found.values() if x.requires_grad)
        return {name: x.view_as(x) if x.requires_grad else _Beside.apply(x, one) for name, x in found.items()}
    return {name: x.view_as(x) for name, x in found.items()} if all(wanted) else {}


class _Beside(torch.autograd.Function):
    """A view that has a gradient wherever another tensor has one, and hands none on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class Gradients:
    """Waits until all are there, and tells them."""

    def __init__(self, adapter: Adapter | FunctionAdapter, out: Tensor, inputs: dict[str, Tensor], told: Told) -> None:
        self._adapter, self._names = adapter, tuple(inputs)
        self._told: Told | None = told
        self._grad: Tensor | None = None
        self._found: dict[str, Tensor] = {}
        out.register_hook(self._of_output)
        for name, x in inputs.items():
            x.register_hook(functools.partial(self._of_input, name))

    def _of_output(self, grad: Tensor) -> None:
        self._grad = self._adapter.seen_output(grad)

    def _of_input(self, name: str, grad: Tensor) -> None:
        self._found[name] = grad.detach()
        if len(self._found) == len(self._names) and self._grad is not None and self._told is not None:
            told, grad, found = self._told, self._grad, {each: self._found.pop(each) for each in self._names}
            self._told = self._grad = None  # a graph may be gone through twice, and what was told is held no longer
            told(grad, self._adapter.seen_inputs(found))
