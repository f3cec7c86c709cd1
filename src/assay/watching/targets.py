"""Which functions are looked for: attention of torch, transformers, flash-attn and ours, as far as it is loaded."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

import assay.flash.attention  # `assay` loads them when they are first used, which may be inside of the watch
import assay.flash.sdpa  # noqa: F401
from assay.watching import flash_attn_
from assay.watching.adapters import EAGER, OURS, SDPA, Adapter, FunctionAdapter
from assay.watching.registered import registered
from assay.watching.torch_layers import ENCODER_LAYER, FUSED_ATTENTION, WITH_WEIGHTS

_KNOWN: tuple[tuple[str, str, Adapter | FunctionAdapter], ...] = (
    ("torch.nn.functional", "scaled_dot_product_attention", SDPA),
    ("torch.nn.functional", "multi_head_attention_forward", WITH_WEIGHTS),
    ("torch", "_native_multi_head_attention", FUSED_ATTENTION),
    ("torch", "_transformer_encoder_layer_fwd", ENCODER_LAYER),
    ("assay.flash.sdpa", "scaled_dot_product_attention", SDPA),
    ("assay.flash.attention", "flash_attention", OURS),
    *(("assay.flash.compat", name, adapter) for name, adapter in flash_attn_.ADAPTERS.items()),
    *(("flash_attn.flash_attn_interface", name, adapter) for name, adapter in flash_attn_.ADAPTERS.items()),
)


def targets(model: nn.Module) -> Iterator[tuple[Callable[..., Any], Adapter | FunctionAdapter]]:
    """Every attention function that is loaded, with its adapter."""
    for module, function, adapter in _KNOWN:
        found = getattr(sys.modules.get(module), function, None)
        if found is not None:
            yield found, _knowing_names(adapter, found)
    seen: set[int] = set()
    for name in {type(module).__module__ for module in model.modules()}:
        eager = getattr(sys.modules.get(name), "eager_attention_forward", None)
        if eager is not None and hasattr(sys.modules[name], "ALL_ATTENTION_FUNCTIONS") and id(eager) not in seen:
            seen.add(id(eager))
            yield eager, _knowing_names(EAGER, eager)
    yield from registered(model)


def _knowing_names(adapter: Adapter | FunctionAdapter, function: Callable[..., Any]) -> Adapter | FunctionAdapter:
    """With the names that this version of the function has; a builtin does not tell."""
    if not isinstance(adapter, Adapter) or adapter.parameters:
        return adapter
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, x in inspect.signature(function).parameters.items() if x.kind in kinds]
    return replace(adapter, parameters=tuple(names))
