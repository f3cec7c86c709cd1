"""Which module of the model is running, and how often the model has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

OUTSIDE = "(outside of the model)"
"""The layer of what others call meanwhile."""


class Running:
    """Follows the model by hooks that are not on its modules: with hooks, some of torch's choose other kernels.

    `begins` is called whenever the whole model begins to run.
    """

    def __init__(self, model: nn.Module, begins: Callable[[], object]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._root, self._begins = model, begins
        self._stack: list[str] = []
        self._calls: dict[str, int] = {}
        self._told = False
        self.between = False
        """Whether it was told that a step is over, and of no next one yet."""
        self.steps = 0
        """Steps that have begun: runs of the whole model, or as many as it was told of."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Follow no more."""
        for handle in self._handles:
            handle.remove()

    @property
    def layer(self) -> str:
        """Name of the innermost module that is running; "" is the model itself."""
        return self._stack[-1] if self._stack else OUTSIDE

    def place(self) -> tuple[str, int, int]:
        """Layer, step, and which of its calls in this step this is."""
        layer = self.layer
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        return layer, max(0, self.steps - 1), call

    def begin(self, step: int) -> None:
        """A step of whoever trains; a second time with the same number it goes on. Runs count no more."""
        if not self._told or step + 1 != self.steps:
            self._calls.clear()
        self._told, self.between, self.steps = True, False, step + 1
        self._stack.clear()

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            if module is self._root:
                self._begins()
                self._stack.clear()
                if not self._told:
                    self.steps += 1
                    self._calls.clear()
            self._stack.append(name)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._stack and self._names.get(id(module)) == self._stack[-1]:
            self._stack.pop()
