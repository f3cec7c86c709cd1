"""One layer's attention as vLLM calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from assay.integrations.vllm_paged import Step, attend, write

CACHES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""What a cache may be made of: None is the model's dtype."""


class AssayImpl(AttentionImpl):  # type: ignore[misc]
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        if others:
            raise ValueError(f"Assay's backend for vLLM does not know {sorted(others)}. Choose another backend.")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"Assay's backend for vLLM runs decoders, got a layer of the type {attn_type!r}.")
        if kv_cache_dtype not in CACHES:
            raise ValueError(
                f"Assay's backend for vLLM takes caches that are not quantised, {', '.join(CACHES)}; "
                f"got {kv_cache_dtype!r}. Use --kv-cache-dtype auto."
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.shared = kv_sharing_target_layer_name is not None  # another layer's cache, which that layer writes
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.scores = {
            "scale": self.scale,
            "window": None if sliding_window is None else (sliding_window - 1, 0),  # vLLM counts the token itself
            "softcap": logits_soft_cap or None,
            "sinks": sinks,
        }

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values, attend, and fill `output`, (tokens, heads, head size), as far as tokens go."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("Assay's backend for vLLM does not quantise its output. Switch off the fusion of the two.")
        if attn_metadata is None:  # vLLM measures memory, there is no cache yet
            return output.fill_(0)
        if key is not None and value is not None and not self.shared:
            write(kv_cache, key, value, attn_metadata)
        slopes = None if self.slopes is None else self.slopes.to(query.device)
        attend(query, kv_cache, attn_metadata, output, self.scores | {"alibi_slopes": slopes})
        return output
