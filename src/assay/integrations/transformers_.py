"""`attn_implementation="assay"` in transformers: putting it there, and taking it away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from assay.integrations.versions import needed

NAME = "assay"


def register() -> None:
    """Register our attention and our masks, both or neither."""
    ours = _ours()
    for interface, function in ours.items():
        taken = interface().get(NAME)
        if taken not in (None, function):
            raise ValueError(
                f"transformers' {interface.__name__} must not have another {NAME!r} yet, got {_place(taken)}. "
                "Remove that one first, or give it another name."
            )
    for interface, function in ours.items():
        interface.register(NAME, function)


def unregister() -> None:
    """Remove what `register` added."""
    for interface, function in _ours().items():
        if interface._global_mapping.get(NAME) is function:  # transformers has no public way back
            del interface._global_mapping[NAME]


def _ours() -> dict[Any, Callable[..., Any]]:
    needed("transformers", (5,), (6,))
    from transformers import AttentionInterface, AttentionMaskInterface

    from assay.integrations.transformers_attention import attention
    from assay.integrations.transformers_masks import mask

    return {AttentionInterface: attention, AttentionMaskInterface: mask}


def _place(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
