"""What is refused on a GPU: before anything is launched there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from assay import flash_attention, scaled_dot_product_attention
from assay.flash.compat import flash_attn_varlen_func, flash_attn_with_kvcache
from assay.flash.decode import attention_with_cache
from assay.flash.numerics import Numerics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def ints(*numbers: int, device: str = "cuda") -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def same(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return zeros(*shape), zeros(*shape), zeros(*shape)


def dense(**changed: Any) -> Callable[[], object]:
    """A good call but for what is changed; made where CUDA is."""

    def call() -> object:
        given: dict[str, Any] = {name: zeros(1, 4, 20, 64) for name in "qkv"}
        given |= {name: make() if callable(make) else make for name, make in changed.items()}
        return flash_attention(**given)

    return call


def cached(**changed: Any) -> Callable[[], object]:
    def call() -> object:
        given: dict[str, Any] = {
            "q": zeros(2, 4, 1, 64),
            "k_cache": zeros(6, 2, 16, 64),
            "v_cache": zeros(6, 2, 16, 64),
        }
        given |= {"block_table": ints(0, 1, 2, 3, 4, 5).view(2, 3), "lengths": ints(40, 17)}
        given |= {name: make() if callable(make) else make for name, make in changed.items()}
        return attention_with_cache(**given)

    return call


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "keys on the CPU": (dense(k=lambda: zeros(1, 4, 20, 64, device="cpu")), "one device"),
    "queries on the CPU": (dense(q=lambda: zeros(1, 4, 20, 64, device="cpu")), "one device"),
    "FP64": (
        dense(**{name: lambda: zeros(1, 4, 20, 64, dtype=torch.float64) for name in "qkv"}),
        "on the CPU also float64",
    ),
    "integers": (dense(q=lambda: zeros(1, 4, 20, 64, dtype=torch.int32)), "must be bfloat16, float16 or float32"),
    "two dtypes": (dense(v=lambda: zeros(1, 4, 20, 64, dtype=torch.float16)), "one dtype"),
    "D 257": (dense(**{name: lambda: zeros(1, 4, 20, 257) for name in "qkv"}), "1 to 256, got 257"),
    "D of V 320": (dense(v=lambda: zeros(1, 4, 20, 320)), "1 to 256, got 320"),
    "heads that do not divide": (dense(**{name: lambda: zeros(1, 3, 20, 64) for name in "kv"}), "multiple of"),
    "too many sequences": (dense(**{name: lambda: zeros(65536, 1, 1, 16) for name in "qkv"}), "65535 sequences"),
    "negative window": (dense(window=(-1, 0)), "at least 0"),
    "packing past the end": (dense(cu_seqlens_q=lambda: ints(0, 5, 21)), "end with the packed length 20"),
    "packing short of the end": (dense(cu_seqlens_q=lambda: ints(0, 5, 19)), "end with the packed length 20"),
    "unsorted packing": (dense(cu_seqlens_q=lambda: ints(0, 15, 5, 20)), "never fall"),
    "packed keys past the end": (
        dense(cu_seqlens_q=lambda: ints(0, 5, 20), cu_seqlens_k=lambda: ints(0, 25, 25)),
        "cu_seqlens_k must begin with 0, never fall, and end with the packed length 20",
    ),
    "packing on the CPU": (dense(cu_seqlens_q=lambda: ints(0, 20, device="cpu")), "device of q"),
    "bias on the CPU": (dense(bias=lambda: zeros(20, 20, device="cpu")), "device of q"),
    "slopes on the CPU": (dense(alibi_slopes=lambda: torch.ones(4)), "device of q"),
    "sinks on the CPU": (dense(sinks=lambda: torch.ones(4)), "device of q"),
    "a seed on the CPU": (dense(dropout_p=0.5, dropout_seed=lambda: torch.tensor(3)), "one int64 on cuda"),
    "scale of NaN": (dense(scale=float("nan")), "scale must be a number"),
    "a tile of 65 keys": (lambda: Numerics(block=(64, 65)), "block must be"),
    "drop-in, mask on the CPU": (
        lambda: scaled_dot_product_attention(*same(1, 4, 20, 64), attn_mask=torch.ones(20, 20)),
        "device of q",
    ),
    "drop-in, mixed devices": (
        lambda: scaled_dot_product_attention(zeros(4, 20, 64), zeros(4, 20, 64, device="cpu"), zeros(4, 20, 64)),
        "one device",
    ),
    "page that does not exist": (cached(block_table=lambda: ints(0, 1, 6, 3, 4, 5).view(2, 3)), "got 6 for page 2"),
    "negative page": (cached(block_table=lambda: ints(0, 1, 2, -1, 4, 5).view(2, 3)), "got -1 for page 0"),
    "length beyond the pages": (cached(lengths=lambda: ints(49, 17)), "got 49 for sequence 0"),
    "negative length": (cached(lengths=lambda: ints(40, -1)), "got -1 for sequence 1"),
    "table on the CPU": (cached(block_table=lambda: ints(*range(6), device="cpu").view(2, 3)), "device of q"),
    "cache of D 512": (
        cached(**{name: lambda: zeros(6, 2, 16, 512) for name in ("k_cache", "v_cache")}),
        "1 to 256, got 512",
    ),
    "compat, past the end": (
        lambda: flash_attn_varlen_func(
            *same(20, 4, 64), ints(0, 25), ints(0, 25), 25, 25, causal=True
        ),
        "end with the packed length 20",
    ),
    "compat, page that does not exist": (
        lambda: flash_attn_with_kvcache(
            zeros(1, 1, 4, 64), zeros(2, 256, 4, 64), zeros(2, 256, 4, 64), cache_seqlens=ints(300),
            block_table=ints(0, 2).view(1, 2),
        ),
        "got 2 for page 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_before_a_launch(name: str) -> None:
    """No kernel of ours runs: what the profiler sees are torch's fills and copies alone."""
    call, message = BAD[name]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen, pytest.raises(ValueError, match=message):
        call()
    torch.cuda.synchronize()
    ours = [event.key for event in seen.key_averages() if "attention" in event.key or "rotate" in event.key]
    assert not ours
    assert flash_attention(*(zeros(1, 1, 16, 64) for _ in range(3))).isfinite().all()  # the context lives


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="one device, got cuda:0, cuda:1"):
        flash_attention(zeros(1, 1, 16, 64), *(zeros(1, 1, 16, 64, device="cuda:1") for _ in range(2)))
