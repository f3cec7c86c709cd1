"""Our attention in diffusers: a processor for its UNets, a context for all its models.

    unet.set_attn_processor(AssayAttnProcessor())    # until another is set
    with use_for_diffusers(pipe.transformer):        # UNets, DiT, Flux and whatever else has processors
        ...

Under each, diffusers' own processor runs as it is, and torch's attention, which it calls, is ours.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from assay.integrations.sdpa import AttentionMode
from assay.integrations.versions import needed

needed("diffusers", (0, 36), (1,))

from diffusers.models.attention_processor import Attention, AttnProcessor2_0  # noqa: E402

_MODE = AttentionMode()
_WARNED: set[type] = set()


class _WithOurs:
    """A processor whose attention is ours."""


class AssayAttnProcessor(_WithOurs, AttnProcessor2_0):
    """What diffusers' `AttnProcessor2_0` computes, the processor of Stable Diffusion's UNets, with our attention."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The output of the module `attn`."""
        if not isinstance(attn, Attention) or attn.added_kv_proj_dim is not None or not attn.scale_qk:
            raise ValueError(
                "AssayAttnProcessor is for the modules that AttnProcessor2_0 is for (Attention of one input, scaled), "
                f"got {type(attn).__name__}. Use `with use_for_diffusers(model):`, which keeps each module's processor."
            )
        with _MODE:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, temb, *args, **kwargs)


@contextmanager
def use_for_diffusers(model: nn.Module) -> Iterator[None]:
    """Inside, the attention of a diffusers model is ours; after it, its own processors are back, the same objects.

    It is for processors that call torch's attention, by themselves or through diffusers' native backend; of those that
    do not, each kind warns once. Attention without a processor, as in some decoders, is for `assay.use_for_sdpa`. A
    processor that is set inside stays.
    """
    modules = [module for module in _modules(model) if callable(getattr(module, "processor", None))]
    if not modules:
        raise ValueError(
            f"model must have attention modules with processors, as diffusers' models do; {type(model).__name__} has "
            "none. `with assay.use_for_sdpa():` is for every model that calls torch's attention."
        )
    replaced = []
    try:
        for module in modules:
            own = module.processor
            ours = _with_ours(own)
            replaced.append((module, own, ours))
            module.processor = ours
        yield
    finally:
        for module, own, ours in replaced:
            if module.processor is ours:
                module.processor = own


def _modules(model: Any) -> Iterator[Any]:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, such as pipe.unet, got {type(model).__name__}.")
    return model.modules()


def _with_ours(processor: Any) -> Any:
    """The same processor with our attention: it has its attributes, all of them, also those that are set later."""
    if isinstance(processor, _WithOurs):
        return processor
    kind: Any = type(processor)
    ours: Any = object.__new__(_class_with_ours(kind))
    object.__setattr__(ours, "__dict__", processor.__dict__)
    return ours


@functools.cache
def _class_with_ours(kind: Any) -> type:
    mode, compute = AttentionMode(), kind.__call__

    @functools.wraps(compute)  # diffusers reads the names of the arguments
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with mode:
                return compute(self, *args, **kwargs)
        before = mode.calls
        with mode:
            result = compute(self, *args, **kwargs)
        if mode.calls == before and kind not in _WARNED:
            _WARNED.add(kind)
            warnings.warn(
                f"{kind.__name__} did not call torch's attention, so ours was not used: it computes attention by "
                "itself, or by another backend than model.set_attention_backend('native').",
                stacklevel=2,
            )
        return result

    return type(f"Assay{kind.__name__}", (_WithOurs, kind), {"__call__": call, "__module__": __name__})
