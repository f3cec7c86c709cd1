"""A stand-in for the part of vLLM that an attention backend touches, written from its source, not copied from it.

Two versions: 0.27.1 (tag v0.27.1), where a backend says the shape of its cache, and the main branch at commit
a014e35f38c (2026-08-22), where vLLM knows it. Of the base classes there are the members that Assay's backend inherits,
overrides or is asked for, with their signatures and defaults; what it is asked before it is chosen is main's.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch

RELEASE, MAIN = "0.27.1", "0.26.1rc1.dev1114+ga014e35f3"
"""A build of the main branch is called after the last tag in its own history."""


class AttentionType(str, Enum):  # noqa: UP042  (as vLLM has it)
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionBackend(ABC):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        use_per_head_quant_scales: bool,
        device_capability: Any,
        attn_type: str,
        has_sliding_window: bool = False,
        use_non_causal: bool = False,
        use_batch_invariant: bool = False,
        use_kv_connector: bool = False,
        use_pcp: bool = False,
        use_adaptive_verification: bool = False,
    ) -> list[str]:
        sizes = [size.base if isinstance(size, MultipleOf) else size for size in cls.get_supported_kernel_block_sizes()]
        wrong = {
            "head size": not cls.supports_head_size(head_size),
            "dtype": dtype not in cls.supported_dtypes,
            "kv cache dtype": kv_cache_dtype is not None and kv_cache_dtype not in cls.supported_kv_cache_dtypes,
            "block size": block_size is not None and all(block_size % size for size in sizes),
            "MLA": use_mla != cls.is_mla(),
            "sinks": has_sink and not cls.supports_sink(),
            "sparse": use_sparse != cls.is_sparse(),
            "per-head scales": use_per_head_quant_scales,
            "mm prefix": use_mm_prefix and not cls.supports_mm_prefix(),
            "attention type": not cls.supports_attn_type(attn_type),
            "sliding window": has_sliding_window and not cls.supports_sliding_window(),
            "non-causal": use_non_causal and not cls.supports_non_causal(),
            "batch invariance": use_batch_invariant and not cls.supports_batch_invariance(),
            "KV connector": use_kv_connector and not cls.supports_kv_connector(),
            "PCP": use_pcp and not cls.get_impl_cls().supports_pcp,
            "query lens mismatch": use_adaptive_verification and not cls.supports_device_cpu_query_lens_mismatch(),
        }
        combination = cls.supports_combination(
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            use_mla,
            has_sink,
            use_sparse,
            use_mm_prefix,
            device_capability,
        )
        return [f"{name} not supported" for name, no in wrong.items() if no] + [x for x in (combination,) if x]


class BackendOfRelease(AttentionBackend):
    """0.27.1: the cache has the shape that the backend says; physically as logically if it says nothing of strides."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]: ...

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        raise NotImplementedError


class AttentionMetadataBuilder(ABC):
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = False

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any: ...

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class AttentionImpl(ABC):
    can_return_lse_for_decode: bool = False
    supports_pcp: bool = False
    supports_quant_query_input: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> AttentionImpl:
        self = super().__new__(cls)
        self.dcp_world_size, self.dcp_rank = 1, 0  # type: ignore[attr-defined]
        return self

    @abstractmethod
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
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None


def _registry() -> ModuleType:
    """A registry of its own each time: overrides are kept by process."""
    overrides: dict[Enum, str] = {}

    class AttentionBackendEnum(Enum):
        FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        CUSTOM = None

        def get_path(self) -> str:
            path = overrides.get(self, self.value)
            if not path:
                raise ValueError(f"Backend {self.name} must be registered before use.")
            return str(path)

        def get_class(self) -> Any:
            module, name = self.get_path().rsplit(".", 1)
            return getattr(import_module(module), name)

        def is_overridden(self) -> bool:
            return self in overrides

        def clear_override(self) -> None:
            overrides.pop(self, None)

    def register_backend(backend: AttentionBackendEnum, class_path: str) -> Callable[[type], type]:
        overrides[backend] = class_path
        return lambda x: x

    return _module(
        "vllm.v1.attention.backends.registry",
        AttentionBackendEnum=AttentionBackendEnum,
        register_backend=register_backend,
    )


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


_OURS = ("assay.integrations.vllm_backend", "assay.integrations.vllm_layer")


@contextmanager
def installed(version: str) -> Iterator[ModuleType]:
    """The registry, while `import vllm` finds this version; before and after our modules on top of it are unloaded."""
    backend = _module(
        "vllm.v1.attention.backend",
        AttentionBackend=BackendOfRelease if version == RELEASE else AttentionBackend,
        AttentionImpl=AttentionImpl,
        AttentionMetadataBuilder=AttentionMetadataBuilder,
        AttentionType=AttentionType,
        MultipleOf=MultipleOf,
    )
    registry = _registry()
    packages = [_module(name) for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")]
    modules = {x.__name__: x for x in (_module("vllm", __version__=version), *packages, backend, registry)}
    hidden = {name: sys.modules.pop(name) for name in (*modules, *_OURS) if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield registry
    finally:
        for name in (*modules, *_OURS):
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
