"""The gradients of one caught call, gathered while the backward pass goes by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from assay.watching.adapters import Adapter, FunctionAdapter

Told = Callable[[Tensor, dict[str, Tensor]], None]
"""Given the gradient of the output, and those of the inputs by their names."""


def own_views(arguments: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Views of these arguments through which only this call's gradients flow; none where two are one tensor."""
    found = [arguments[name] for name in names]
    if len({id(x) for x in found}) < len(found) or not all(x.requires_grad for x in found):
        return {}
    return {name: x.view_as(x) for name, x in zip(names, found, strict=True)}


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
