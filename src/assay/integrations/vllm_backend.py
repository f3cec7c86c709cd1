"""The backend as vLLM sees it: what it supports, and what its layers share in a step.

vLLM imports this module by the path that `vllm_` registers. It asks the class what it supports, and names the reason
where it does not: quantised caches, MLA, encoders, sparse and non-causal attention, KV connectors, context parallelism.
What vLLM does not ask about is refused here and in `vllm_layer`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf

from assay.flash.checks import LARGEST_DIM
from assay.integrations.vllm_layer import CACHES, AssayImpl
from assay.integrations.vllm_paged import Step, plan_step


class AssayBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the `Step` that the layers of a group share. It reads from the GPU, so no CUDA graph may contain it."""

    reorder_batch_threshold: int | None = 1
    """vLLM puts sequences with one new token to the front. Elsewhere they are only slower."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The step. A common prefix is attended to like any other keys: there is no cascade."""
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("Assay's backend for vLLM is causal, and this step is not, or not in every sequence.")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name) is not None:
                raise ValueError(f"Assay's backend for vLLM has no masks of this kind: {name}. Choose another backend.")
        count = common.num_reqs
        return plan_step(
            common.query_start_loc_cpu[: count + 1].tolist(),
            common.query_start_loc[: count + 1],
            common.seq_lens[:count],
            common.block_table_tensor[:count],
            common.slot_mapping,
            self.kv_cache_spec.block_size,
        )


class AssayBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks before it takes the backend; what is not said here is no, as in its base class."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHES)
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """The place in vLLM's registry; it looks the backend up by this name."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AssayImpl]:
        """Attention of a layer."""
        return AssayImpl

    @staticmethod
    def get_builder_cls() -> type[AssayBuilder]:
        """What the layers share."""
        return AssayBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Asked up to 0.28; after that all backends have this shape, and vLLM chooses the strides."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """The kernels take pages of any size. vLLM takes the least it is offered where windows slide: not 1."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Every size up to 256."""
        return 1 <= head_size <= LARGEST_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """One more logit for each head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Keys at most so far back."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Nobody has tried to move these caches elsewhere."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The step is planned by the lengths that the host knows."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any
    ) -> str | None:
        """The reason why not: the kernels take queries and keys of one dtype."""
        cache = CACHES.get(kv_cache_dtype or "auto")
        if cache is None or cache == dtype:
            return None
        return f"a cache of {kv_cache_dtype} under a model of {dtype} is not supported: use --kv-cache-dtype auto"
