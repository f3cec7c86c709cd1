"""The operators under `torch.vmap`: the mapped dimension becomes part of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assay.flash.ops import attention

_BATCHED = 5  # q, k, v, bias and slopes begin with the batch; what follows belongs to no sequence


def _mapped(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    tensors, rest = arguments[:_BATCHED], arguments[_BATCHED:]
    if rest[3] is not None:  # the seed, which is mapped itself where each call is to draw its own
        raise ValueError("vmap and dropout exclude each other here: map over a batch dimension of q instead.")
    if any(dim is not None for dim in dims[_BATCHED:]):
        raise ValueError("vmap maps q, k, v, bias and alibi_slopes of flash_attention; sinks and cu_seqlens it cannot.")
    if rest[1] is not None:
        raise ValueError("vmap and cu_seqlens exclude each other: packed sequences are a batch of 1.")
    size = info.batch_size
    batch = _first(tensors[0], dims[0], size).shape[1]
    folded = [None if x is None else _fold(x, dim, size, batch) for x, dim in zip(tensors, dims, strict=False)]
    out, lse = attention(*folded, *rest)
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def _first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped dimension first, made by repetition where x is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _fold(x: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """The mapped dimension and the batch as one; a bias that is one for the whole batch is repeated."""
    first = _first(x, dim, size)
    return first.expand(size, batch, *first.shape[2:]).flatten(0, 1)


torch.library.register_vmap("assay::flash_forward", _mapped)
