"""diffusers' attention in two steps: probabilities from `get_attention_scores`, which `torch.bmm` multiplies by v.

This is how its processors without SDPA compute (AttnProcessor, SlicedAttnProcessor and others). Each step is caught,
and the second knows the first by the very tensor that it is given.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from assay.watching.adapters import Adapter, Arguments, computed_in
from assay.watching.call import AttentionCall

SCORES = "get_attention_scores"
Function = Callable[..., Any]


def owners(model: nn.Module) -> Iterator[type]:
    """Classes of the model's modules that have the first step."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return (kind for kind in kinds if SCORES in vars(kind) and kind.__module__.startswith("diffusers."))


@dataclass(frozen=True, eq=False, slots=True)
class _First:
    """What the first step was given, and gave."""

    module: Any
    q: Tensor
    k: Tensor
    mask: Tensor | None
    probabilities: Tensor
    version: int
    layer: str


@dataclass(frozen=True, kw_only=True)
class _Product(Adapter):
    """Of the second step; batch and heads are one dimension in it."""

    heads: int

    def invoke(self, function: Function, arguments: Arguments) -> Any:
        """Call it."""
        return function(arguments["first"].probabilities, arguments["value"])

    def views(self, arguments: Arguments) -> dict[str, Tensor]:
        """q and k went into the first step as views."""
        found = {name: arguments[name] for name in self.tensors}
        if not all(x.requires_grad for x in found.values()):
            return {}
        return found | {"value": arguments["value"].view_as(arguments["value"])}

    def seen_output(self, x: Tensor) -> Tensor:
        """The output or its gradient as (B, H, N, D)."""
        return _four(x.detach(), self.heads)

    def seen_inputs(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same of q, k and v, by these names."""
        return {name: self.seen_output(x) for name, x in zip("qkv", gradients.values(), strict=True)}


class TwoSteps:
    """Catches both. `away` says whether nobody looks, `layer` who runs, `see` takes a call, `lost` a layer's."""

    def __init__(
        self,
        away: Callable[[], bool],
        layer: Callable[[], str],
        see: Callable[[Function, Adapter, Arguments], Any],
        lost: Callable[[str], None],
    ) -> None:
        self._away, self._layer, self._see, self._lost = away, layer, see, lost
        self._held = threading.local()

    def close(self) -> None:
        """There comes no second step any more."""
        self._hold(None)

    def first(self, function: Function) -> Function:
        """What stands in the place of `get_attention_scores`."""

        @functools.wraps(function)
        def scores(module: Any, query: Tensor, key: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            if self._away():
                found: Tensor = function(module, query, key, attention_mask)
                return found
            q, k = (x.view_as(x) if x.requires_grad and torch.is_grad_enabled() else x for x in (query, key))
            found = function(module, q, k, attention_mask)
            self._hold(_First(module, q, k, attention_mask, found, found._version, self._layer()))
            return found

        return scores

    def second(self, function: Function) -> Function:
        """What stands in the place of `torch.bmm`."""

        @functools.wraps(function)
        def product(*args: Any, **kwargs: Any) -> Any:
            first: _First | None = getattr(self._held, "first", None)
            if first is None or kwargs or len(args) != 2 or args[0] is not first.probabilities or self._away():
                return function(*args, **kwargs)
            self._held.first = None
            whole = first.q.shape[0]
            heads = first.module.heads if whole % first.module.heads == 0 else whole  # a slice of some heads
            adapter = _Product(name="bmm", tensors=("query", "key", "value"), call=_call, heads=heads)
            given = {"first": first, "query": first.q, "key": first.k, "value": args[1], "heads": heads}
            return self._see(function, adapter, given)

        return product

    def _hold(self, first: _First | None) -> None:
        before: _First | None = getattr(self._held, "first", None)
        if before is not None:
            self._lost(before.layer)
        self._held.first = first


def _call(a: Arguments) -> AttentionCall | str:
    first, heads = a["first"], a["heads"]
    if first.probabilities._version != first.version:
        return "probabilities that were changed after the softmax"
    q, k, v = (_four(x, heads) for x in computed_in(first.q, first.k, a["value"]))
    mask = first.mask
    if mask is not None:
        mask = _four(mask, heads) if mask.shape[0] == first.q.shape[0] else mask.detach()[None]
    return AttentionCall(q=q, k=k, v=v, scale=float(first.module.scale), bias=mask)


def _four(x: Tensor, heads: int) -> Tensor:
    found: Tensor = x.detach().unflatten(0, (-1, heads))
    return found
