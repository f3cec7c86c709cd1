"""Random calls for the emulated Hopper kernels: shapes, strides, masks, options; and a card that says it is Hopper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.gluon.loader import Loader

Random = np.random.Generator
_LOADERS: dict[str, Any] = {}
"""One of each: operators can be registered once only."""


class Card:
    """What host code asks of the card."""

    multi_processor_count, major, minor, name = 1, 9, 0, "emulated"


def loader_of(root: str, processors: int) -> Any:
    """Of the sources below `root`, for a card of so many processors."""
    Card.multi_processor_count = processors
    if root not in _LOADERS:
        _LOADERS[root] = Loader(root)
    for module in _LOADERS[root].modules.values():
        for name, function in vars(module).items():
            if name.endswith("processors"):  # host code remembers how many there are
                function.cache_clear()
    return _LOADERS[root]


def pretend_hopper() -> None:
    """For the rest of the process: torch.cuda answers for a Hopper card, and torch.empty gives NaN."""
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: Card
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.is_current_stream_capturing = lambda: False
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    cuda.current_stream = lambda *_: stream
    core: Any = torch._C
    core._cuda_getCurrentRawStream = lambda _: 0
    torch.use_deterministic_algorithms(True, warn_only=True)
    whole: Any = torch
    whole.are_deterministic_algorithms_enabled = lambda: False  # else dQ would never be added up


def random_tensor(rng: Random, batch: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    if rng.random() < 0.3:  # (B, N, H, D) in memory
        return torch.randn(batch, length, heads, dim).to(dtype).transpose(1, 2)
    if rng.random() < 0.2:  # rows further apart
        return torch.randn(batch, heads, length, dim + 8).to(dtype)[..., :dim]
    return torch.randn(batch, heads, length, dim).to(dtype)


def random_length(rng: Random, most: int) -> int:
    """Up to `most`, often at or beside a tile's edge."""
    edges = [1, 2, 17, 63, 64, 65, 127, 128, 129, 200, 256, 257, 300, most, int(rng.integers(1, most + 1))]
    return min(most, int(rng.choice(edges)))


def random_packing(rng: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Where sequences begin, of queries and of keys; some are empty."""
    count = int(rng.integers(1, 5))
    queries = [int(rng.choice([0, 1, 5, 64, 100, 128, 130, int(rng.integers(0, 300))])) for _ in range(count)]
    keys = queries
    if rng.random() < 0.5:
        keys = [int(rng.choice([0, 1, 7, 64, 128, int(rng.integers(0, 300))])) for _ in range(count)]
    queries = [3, *queries[1:]] if sum(queries) == 0 else queries
    keys = [*keys[:-1], 3] if sum(keys) == 0 else keys
    starts = [torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (queries, keys)]
    return starts[0], starts[1]


def random_call(rng: Random, call: Any, dims: tuple[int, int], most: int = 400, **more: Any) -> Any:
    """A `Call`; `call` is that class."""
    dtype = (torch.bfloat16, torch.bfloat16, torch.float16)[rng.integers(3)]
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * int(rng.integers(1, 4))
    cu_q = cu_k = None
    batch = sequences = int(rng.integers(1, 3))
    if rng.random() < 0.35:
        cu_q, cu_k = random_packing(rng)
        batch, sequences, queries, keys = 1, len(cu_q) - 1, int(cu_q[-1]), int(cu_k[-1])
    else:
        queries = random_length(rng, most)
        keys = queries if rng.random() < 0.5 else random_length(rng, most)
    kind = ("full", "causal", "causal", "window", "left", "right")[rng.integers(6)]
    left = int(rng.choice([0, 1, 50, 64, 128, 192, 200])) if kind in ("window", "left") else None
    right = int(rng.choice([0, 0, 1, 30, 100, -3])) if kind in ("window", "right") else None
    return call(
        q=random_tensor(rng, batch, heads, queries, dims[0], dtype),
        k=random_tensor(rng, batch, kv_heads, keys, dims[0], dtype),
        v=random_tensor(rng, batch, kv_heads, keys, dims[1], dtype),
        scale=float(dims[0] ** -0.5 * rng.choice([1, 1, 0.3, -1, 4])),
        left=left,
        right=0 if kind == "causal" else right,
        slopes=torch.rand(sequences, heads) * 0.3 if rng.random() < 0.25 else None,
        sinks=torch.randn(heads).to((torch.float32, dtype)[rng.integers(2)]) if rng.random() < 0.25 else None,
        softcap=float(rng.choice([5.0, 30.0])) if rng.random() < 0.2 else None,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        **more,
    )


def spoil(rng: Random, call: Any) -> int | None:
    """Packed, sometimes: a sequence whose V (and K) becomes NaN, which must not leak into others. Its number."""
    if call.cu_seqlens_k is None or len(call.cu_seqlens_k) < 3 or rng.random() > 0.4:
        return None
    one = int(rng.integers(len(call.cu_seqlens_k) - 1))
    rows = slice(int(call.cu_seqlens_k[one]), int(call.cu_seqlens_k[one + 1]))
    call.v[:, :, rows] = torch.nan
    if rng.random() < 0.5:
        call.k[:, :, rows] = torch.nan
    return one


def described(call: Any) -> str:
    said = {name: getattr(call, name) for name in ("scale", "left", "right", "softcap", "deterministic")}
    said |= {name: tuple(getattr(call, name).shape) for name in ("q", "k", "v")}
    said |= {name: x.tolist() for name in ("cu_seqlens_q", "cu_seqlens_k") if (x := getattr(call, name)) is not None}
    said |= {name: True for name in ("slopes", "sinks") if getattr(call, name) is not None}
    return f"{call.q.dtype} " + ", ".join(
        f"{name} {value}" for name, value in said.items() if value not in (None, False)
    )
