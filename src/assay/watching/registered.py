"""Attention that transformers' models call by a name: functions of the user's and of the hub, registered there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from assay.watching.adapters import Adapter, Arguments, computed_in, scale_of
from assay.watching.call import AttentionCall
from assay.watching.packed_call import PackedCall, packed

_BY_POSITION = ("module", "query", "key", "value", "attention_mask")
"""What an attention interface is called with; a function may name them otherwise."""
_CAUGHT_INSIDE = ("transformers.integrations.sdpa_attention", "assay.")
"""Where functions come from that do nothing but call others that are caught."""
_CHOOSING = ("cache", "indices", "block_indices")
"""Arguments by which the function itself decides which keys there are."""
Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Registered(Adapter):
    """Of a function in transformers' table."""

    def named(self, arguments: Arguments) -> str:
        """As the model's configuration calls it: one function may stand under several names."""
        config = getattr(arguments["module"], "config", None)
        return getattr(config, "_attn_implementation", None) or self.name

    def invoke(self, function: Callable[..., Any], arguments: Arguments) -> Any:
        """Call it as models do."""
        given = [arguments[name] for name in _BY_POSITION if name in arguments]
        return function(*given, **{name: x for name, x in arguments.items() if name not in _BY_POSITION})

    def applies(self, arguments: Arguments) -> bool:
        """Where flash-attn's own functions are found, they are: they know more of packed sequences."""
        return not (self.named(arguments) == "flash_attention_2" and "flash_attn.flash_attn_interface" in sys.modules)


def tables(model: nn.Module) -> list[Table]:
    """Every table in which modules of the model look their attention up by name."""
    files = (sys.modules.get(name) for name in {type(module).__module__ for module in model.modules()})
    interfaces = {id(x): x for x in (getattr(file, "ALL_ATTENTION_FUNCTIONS", None) for file in files)}.values()
    found = [getattr(x, name, None) for x in interfaces for name in ("_local_mapping", "_global_mapping")]
    return list({id(table): table for table in found if isinstance(table, dict)}.values())


def registered(model: nn.Module) -> Iterator[tuple[Callable[..., Any], Adapter]]:
    """The functions in them, each with its adapter."""
    for table in tables(model):
        for name, function in table.items():
            if not str(getattr(function, "__module__", "")).startswith(_CAUGHT_INSIDE):
                yield function, _Registered(
                    name=name, parameters=_BY_POSITION, tensors=("query", "key", "value"), call=_call,
                    output_heads_second=False,
                )  # fmt: skip


def _call(a: Arguments) -> AttentionCall | PackedCall | str:
    module = a["module"]
    if a.get("dropout", 0.0) and module.training:
        return "dropout"
    choosing = next((name for name in _CHOOSING if a.get(name) is not None), None)
    if choosing is not None:
        return f"keys that the function itself chooses ({choosing})"
    q, k, v = computed_in(a["query"], a["key"], a["value"])
    how: dict[str, Any] = {
        "scale": scale_of(a.get("scaling"), q), "softcap": a.get("softcap"), "sinks": a.get("s_aux"),
    }  # fmt: skip
    asked = a.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if asked is None else asked) and q.shape[2] > 1
    window = a.get("sliding_window")
    mask, bias = a.get("attention_mask"), a.get("position_bias")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):  # it says all, the window too
        written = _written(mask, q, k)
        return written if isinstance(written, str) else AttentionCall(q=q, k=k, v=v, bias=_added(bias, written), **how)
    if causal and q.shape[2] != k.shape[2]:
        return "no mask and another number of keys than queries, where functions mean different things by causal"
    how |= {"left": window - 1 if window else None, "right": 0 if causal else window - 1 if window else None}
    starts, key_starts = a.get("cu_seq_lens_q"), a.get("cu_seq_lens_k")
    if starts is not None and mask is None and bias is None:
        return packed(q, k, v, starts, starts if key_starts is None else key_starts, None, **how)
    if _is_packed(a.get("position_ids"), q):
        return "sequences that only position_ids tell apart"
    padding = None if mask is None else _padding(mask, q, k)
    return AttentionCall(q=q, k=k, v=v, bias=padding if bias is None else _added(bias, padding), **how)


def _written(mask: Any, q: Tensor, k: Tensor) -> Tensor | str:
    """The mask with all four dimensions; or why it is not known."""
    if type(mask).__name__ == "BlockMask":  # of flex_attention, which must be loaded then
        from torch.nn.attention.flex_attention import create_mask

        batch, heads = mask.shape[:2]
        return create_mask(mask.mask_mod, batch, heads, q.shape[2], k.shape[2], str(q.device))
    if type(mask) not in (Tensor, nn.Parameter) or mask.dim() != 4:
        return f"a mask of the kind {type(mask).__name__}"
    found: Tensor = mask.detach()[..., : k.shape[2]]
    return found


def _padding(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Of (batch, keys) that is true for tokens: others are not seen, and see nothing."""
    tokens = mask.bool()[:, -k.shape[2] :]
    return tokens[:, None, None, :] & tokens[:, None, -q.shape[2] :, None]


def _added(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Both at once."""
    if bias is None or mask is None:
        return mask if bias is None else bias.detach()
    return bias.detach().masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias.detach() + mask


def _is_packed(positions: Tensor | None, q: Tensor) -> bool:
    """Whether they begin anew in the middle; only in a batch of one, as transformers has it."""
    if positions is None or q.shape[0] != 1 or positions.shape[-1] < 2:
        return False
    return bool((positions.diff(dim=-1) != 1).any())
