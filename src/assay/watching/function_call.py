"""A call of any function that the user named, beside a plain one of the same signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class FunctionCall:
    """What went in. Tensors count as one head of many rows."""

    plain_function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def detached(self) -> FunctionCall:
        """Without gradients."""
        return self._each(lambda x: x.detach())

    def in_double(self) -> FunctionCall:
        """The same numbers in FP64."""
        return self._each(lambda x: x.double() if x.is_floating_point() else x)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating tensor."""
        return next((x.dtype for x in self._tensors().values() if x.is_floating_point()), torch.float32)

    def plain(self, grad: Tensor | None) -> Sequence[Tensor]:
        """What the plain function gives; given the gradient of that, also those of its floating arguments."""
        with torch.set_grad_enabled(grad is not None):
            call = self._each(lambda x: x.detach().requires_grad_(grad is not None) if x.is_floating_point() else x)
            out = as_one_head(self.plain_function(*call.args, **call.kwargs))
        if grad is None:
            return (out,)
        leaves = [x for x in call._tensors().values() if x.requires_grad]
        found = torch.autograd.grad(out, leaves, grad.to(out.dtype).view_as(out), allow_unused=True)
        gradients = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
        return out.detach(), *map(as_one_head, gradients)

    def golden(self, grad: Tensor | None) -> tuple[Sequence[Tensor], None]:
        """The same in FP64, a module's weights too; there are no scores."""
        function = self.plain_function
        if isinstance(function, nn.Module):
            state = {**dict(function.named_parameters()), **dict(function.named_buffers())}
            wide = {name: x.detach().double() if x.is_floating_point() else x for name, x in state.items()}

            def in_double(*args: Any, **kwargs: Any) -> Any:
                return functional_call(function, wide, args, kwargs)

            return replace(self.in_double(), plain_function=in_double).plain(grad), None
        return self.in_double().plain(grad), None

    def gives(self, x: Tensor) -> bool:
        """Whether `x` can be its output: any may be."""
        return True

    def columns(self) -> dict[str, Any]:
        """Nothing that rows have columns for."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What it takes to replay it."""
        return self._tensors()

    def notes(self) -> dict[str, str]:
        """Nothing that has a name."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        named = {str(number): x for number, x in enumerate(self.args)} | self.kwargs
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def _each(self, change: Callable[[Tensor], Tensor]) -> FunctionCall:
        def changed(x: Any) -> Any:
            return change(x) if isinstance(x, Tensor) else x

        kwargs = {name: changed(x) for name, x in self.kwargs.items()}
        return replace(self, args=tuple(map(changed, self.args)), kwargs=kwargs)


def as_one_head(x: Any) -> Tensor:
    """The tensor, or the first of several, as (1, 1, rows, last dimension)."""
    if isinstance(x, tuple | list):
        x = x[0]
    if not isinstance(x, Tensor):
        raise ValueError(f"A watched function must give a tensor, or a tuple that begins with one; got {type(x)}.")
    return x.reshape(1, 1, -1, x.shape[-1]) if x.dim() else x.reshape(1, 1, 1, 1)
