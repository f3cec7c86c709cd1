"""Assay inside other libraries. Each has a module of its own, which imports its library; importing changes nothing."""

from __future__ import annotations


def register_transformers() -> None:
    """Make `attn_implementation="assay"` work in transformers 5: `flash_attention`, and the masks it needs.

    A second call changes nothing. A ValueError if somebody else has registered that name, or for another transformers.
    """
    from assay.integrations.transformers_ import register

    register()


def unregister_transformers() -> None:
    """Take `attn_implementation="assay"` back; nothing happens if it is not there, or not ours.

    Models that still have it as their implementation then fail with a KeyError of transformers that names it: call
    `model.set_attn_implementation("sdpa")` on them.
    """
    from assay.integrations.transformers_ import unregister

    unregister()
