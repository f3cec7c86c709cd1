"""Functions replaced wherever modules hold them, and put back: nothing stays patched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_SPARED = ("torch._C", "torch.overrides", "assay.watching")
"""Modules that keep the original: torch's own tables, and us."""


_NOTHING = object()


class Replaced:
    """While it is open, other functions stand where the originals were, also under names they were imported by."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, str, Any, Any]] = []

    def replace(self, original: Callable[..., Any], other: Callable[..., Any]) -> int:
        """Put `other` wherever a loaded module has `original`; how many places that are."""
        found = 0
        for name, module in list(sys.modules.items()):
            if name.startswith(_SPARED) or not isinstance(module, ModuleType):
                continue
            for attribute, value in list(vars(module).items()):
                if value is original:
                    self.replace_in(module, attribute, other)
                    found += 1
        return found

    def replace_in(self, owner: Any, attribute: str, other: Any) -> None:
        """Put `other` in one place."""
        self._places.append((owner, attribute, vars(owner).get(attribute, _NOTHING), other))
        setattr(owner, attribute, other)

    def restore(self) -> None:
        """Put the originals back, but for places where somebody has put something else since."""
        while self._places:
            owner, attribute, original, other = self._places.pop()
            if vars(owner).get(attribute) is not other:
                continue
            if original is _NOTHING:  # the class has it, as a module its forward
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)
