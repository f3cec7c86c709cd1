"""`flash_attention` as transformers calls attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assay.flash.attention import flash_attention
from assay.integrations.position_mask import PositionMask

_OTHERS = {
    "indices": "chooses each query's keys by `indices`",
    "block_indices": "chooses each query's keys by `block_indices`",
    "cache": "reads a paged cache (continuous batching)",
}
"""Arguments that change what attention is, and that we do not know: dropping them in silence would be wrong."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """(batch, queries, heads, D_v), and no weights, for (batch, heads, queries, D) and (batch, KV heads, keys, D).

    A mask says everything about who sees whom, `sliding_window` included. Without one, several queries of a causal
    module see the keys up to their own number, counted from the first: this is how transformers leaves masks away.
    """
    _refuse(module, others)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    sight = _sight(query, key, attention_mask, causal)
    filled = sight.pop("filled", key.shape[2])
    key, value = key[:, :, :filled], value[:, :, :filled]
    if position_bias is not None:
        sight["bias"] = _added(position_bias[..., :filled], sight.get("bias"))
    if attention_mask is None and cu_seq_lens_q is not None:
        sight |= {"cu_seqlens_q": cu_seq_lens_q, "cu_seqlens_k": cu_seq_lens_k}
    out = flash_attention(
        query,
        key,
        value,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout_p=dropout if module.training else 0.0,
        **sight,
    )
    return out.transpose(1, 2).contiguous(), None


def _sight(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> dict[str, Any]:
    """Which keys are seen, in the words of `flash_attention`; `filled`: how many of the keys count at all."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        if not causal or queries == 1:
            return {}
        # The first query beside the first key. Keys beyond the last query are a static cache's that is still empty.
        return {"causal": True, "filled": queries} if keys >= queries else {"window": (None, queries - keys)}
    if isinstance(mask, PositionMask) and mask.written is None:
        rule, tokens = mask.rule, mask.tokens
        sight = {"causal": rule.causal, "window": rule.window, "filled": tokens.shape[1]}
        return sight | {"bias": tokens[:, None, None, :]} if rule.padded else sight
    _check(mask, query, key)
    return {"bias": mask.written if isinstance(mask, PositionMask) else mask}


def _check(mask: object, query: Tensor, key: Tensor) -> None:
    if isinstance(mask, Tensor) and mask.dim() == 4 and (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        return
    shape = (*query.shape[:3], key.shape[2])
    got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise ValueError(
        "With attn_implementation='assay' a mask that reaches the layers must be None or a tensor (batch, heads or 1, "
        f"queries, keys) = {shape}, bool (True is seen) or float (added to the scores); got {got}. "
        "Give the model a 2-D attention_mask (1 for tokens, 0 for padding), or a mask of this kind."
    )


def _added(position_bias: Tensor, mask: Tensor | None) -> Tensor:
    """A bias for the scores that also hides what the mask hides."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _refuse(module: torch.nn.Module, others: dict[str, Any]) -> None:
    if others.get("output_attentions"):
        raise ValueError(
            "attn_implementation='assay' never has the attention weights as a whole, so it cannot return them "
            "(output_attentions=True): use attn_implementation='eager' for that."
        )
    for name, what in _OTHERS.items():
        if others.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} {what}, which attn_implementation='assay' does not: "
                "use attn_implementation='sdpa' or 'eager' for this model."
            )
