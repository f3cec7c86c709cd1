"""flash-attn's functions: how each takes its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assay.watching.adapters import Adapter, Arguments, computed_in, scale_of
from assay.watching.call import AttentionCall
from assay.watching.packed_call import PackedCall, packed


def _three(a: Arguments) -> list[Tensor]:
    """q, k and v, also where one tensor holds several."""
    if "qkv" in a:
        found = list(a["qkv"].unbind(-3))
    else:
        found = [a["q"], *a["kv"].unbind(-3)] if "kv" in a else [a["q"], a["k"], a["v"]]
    # Theirs takes no FP32; ours does, and under autocast casts it.
    return [computed_in(x)[0] if x.dtype == torch.float32 else x for x in found]


def _how(a: Arguments, q: Tensor) -> dict[str, Any]:
    left, right = (None if side is None or side < 0 else side for side in a.get("window_size", (-1, -1)))
    return {
        "scale": scale_of(a.get("softmax_scale"), q), "left": left, "right": 0 if a.get("causal") else right,
        "softcap": a.get("softcap") or None,
    }  # fmt: skip


def _dense(a: Arguments) -> AttentionCall | str:
    if a.get("dropout_p", 0.0):
        return "dropout"
    q, k, v = (x.transpose(1, 2) for x in _three(a))
    return AttentionCall(q=q, k=k, v=v, slopes=a.get("alibi_slopes"), **_how(a, q))


def _varlen(a: Arguments) -> PackedCall | str:
    if a.get("dropout_p", 0.0):
        return "dropout"
    if a.get("block_table") is not None:
        return "pages of keys"
    q, k, v = (x.transpose(0, 1)[None] for x in _three(a))
    starts = a["cu_seqlens"] if "cu_seqlens" in a else a["cu_seqlens_q"]
    key_starts = a["cu_seqlens"] if "cu_seqlens" in a else a["cu_seqlens_k"]
    return packed(q, k, v, starts, key_starts, a.get("alibi_slopes"), **_how(a, q))


def _cache(a: Arguments) -> str:
    return "a cache of keys (flash_attn_with_kvcache)"


def _adapter(call: Callable[[Arguments], AttentionCall | PackedCall | str], *tensors: str) -> Adapter:
    return Adapter(name="flash_attn", tensors=tensors, call=call, heads_second=False, output_heads_second=False)


ADAPTERS: dict[str, Adapter] = {
    "flash_attn_func": _adapter(_dense, "q", "k", "v"),
    "flash_attn_kvpacked_func": _adapter(_dense, "q", "kv"),
    "flash_attn_qkvpacked_func": _adapter(_dense, "qkv"),
    "flash_attn_varlen_func": _adapter(_varlen, "q", "k", "v"),
    "flash_attn_varlen_kvpacked_func": _adapter(_varlen, "q", "kv"),
    "flash_attn_varlen_qkvpacked_func": _adapter(_varlen, "qkv"),
    "flash_attn_with_kvcache": _adapter(_cache, "q"),
}
"""Of each function, by its name."""
