"""Functions replaced wherever modules hold them, and put back: nothing stays patched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn
from torch.overrides import has_torch_function

_SPARED = ("torch._C", "torch.overrides", "assay.watching")
"""Modules that keep the original: torch's own tables, and us."""


_NOTHING = object()
Function = Callable[..., Any]


class Replaced:
    """While it is open, other functions stand where the originals were, also under names they were imported by.

    That is in every module that Python has loaded, in every module of the model, and in `tables`, by their keys.
    """

    def __init__(self, model: nn.Module, tables: Sequence[dict[str, Any]] = ()) -> None:
        self._model, self._tables = model, tables
        self._places: list[tuple[Any, str, Any, Any]] = []
        self._functions: dict[Function, Function] = {}

    def replace(self, others: Mapping[Function, Function]) -> set[Function]:
        """Put others wherever a loaded module has the originals; which of those were found."""
        self._functions |= others
        by_identity = {id(original): original for original in others}
        found = list(self._holders(by_identity))
        for owner, attribute, original in found:
            self.replace_in(owner, attribute, others[original])
        return {original for _, _, original in found}

    def _holders(self, functions: Mapping[int, Function]) -> Iterator[tuple[Any, str, Function]]:
        """Who has one of these functions, under which name, and which; given by identity."""
        loaded = [module for name, module in list(sys.modules.items()) if not name.startswith(_SPARED)]
        modules = [module for module in loaded if isinstance(module, ModuleType)]
        for owner in (*modules, *self._model.modules(), *self._tables):
            for attribute, value in list(_entries(owner).items()):
                if id(value) in functions:
                    yield owner, attribute, functions[id(value)]

    def replace_in(self, owner: Any, attribute: str, other: Any) -> None:
        """Put `other` in one place."""
        self._places.append((owner, attribute, _entries(owner).get(attribute, _NOTHING), other))
        _put(owner, attribute, other)

    def genuine(self, function: Function) -> Function:
        """The original, to be called by what stands in its place.

        Tensors and modes that override torch's functions ask by identity which one is called (`func is F.…`), so for
        them it is back in its place while it runs.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not has_torch_function((*args, *kwargs.values())):
                return function(*args, **kwargs)
            places = [(owner, name, other) for owner, name, original, other in self._places if original is function]
            for owner, name, _ in places:
                _put(owner, name, function)
            try:
                return function(*args, **kwargs)
            finally:
                for owner, name, other in places:
                    _put(owner, name, other)

        return call

    def restore(self) -> None:
        """Put the originals back, but for places where somebody has put something else since."""
        while self._places:
            owner, attribute, original, other = self._places.pop()
            if _entries(owner).get(attribute) is not other:
                continue
            if original is _NOTHING:  # the class has it, as a module its forward
                delattr(owner, attribute)
            else:
                _put(owner, attribute, original)
        # Whoever was loaded in the meantime has imported ours.
        for owner, attribute, original in list(self._holders({id(ours): it for it, ours in self._functions.items()})):
            _put(owner, attribute, original)
        self._functions.clear()


def _entries(owner: Any) -> Mapping[str, Any]:
    """What it has, by name."""
    return owner if isinstance(owner, dict) else vars(owner)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
