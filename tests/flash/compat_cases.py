"""Inputs and references of the tests of flash-attn's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cases import error, largest
from .reference import reference_attention

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (5, 3)}, {"window": (5, 3)}),
    "window on one side": ({"window_size": (-1, 2)}, {"window": (None, 2)}),
    "window, causal": ({"window_size": (4, -1), "causal": True}, {"window": (4, None), "causal": True}),
    "softcap and scale": ({"softcap": 2.0, "softmax_scale": 0.7}, {"softcap": 2.0, "scale": 0.7}),
    "alibi": ({"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},) * 2,
    "alibi of each": ({"alibi_slopes": torch.linspace(0.0, 0.7, 8).view(2, 4)},) * 2,
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cumulative(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def check(ours: list[torch.Tensor], reference: Callable[[torch.dtype], list[torch.Tensor]], factor: int = 2) -> None:
    """At most `factor` times the error of plain attention in FP32, plus a few roundings."""
    for x, truth, plain in zip(ours, reference(torch.float64), reference(torch.float32), strict=True):
        assert x.shape == truth.shape
        rounding = 4 * torch.finfo(torch.float32).eps * max(1.0, largest(truth))
        assert error(x, truth) <= factor * error(plain, truth) + rounding


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable[..., list[torch.Tensor]]:
    """The reference's output and LSE for inputs (B, N, H, D)."""

    def in_dtype(dtype: torch.dtype) -> list[torch.Tensor]:
        out, lse = reference_attention(*(x.to(dtype).transpose(1, 2) for x in (q, k, v)), **options)
        return [out.transpose(1, 2), lse]

    return in_dtype


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable[..., list[torch.Tensor]]:
    """The same for inputs (all lengths, H, D)."""

    def in_dtype(dtype: torch.dtype) -> list[torch.Tensor]:
        out, lse = reference_attention(*(x.to(dtype).transpose(0, 1)[None] for x in (q, k, v)), **options)
        return [out[0].transpose(0, 1), lse[0]]

    return in_dtype


def gradients(attend: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> list[torch.Tensor]:
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    out = attend(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return list(torch.autograd.grad((out * weights).sum(), leaves))


def paged(k: torch.Tensor, lengths: tuple[int, ...], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed keys in pages that lie in no order, and their table; what is not a key is NaN."""
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
    pages = torch.full((sum(counts), size, *k.shape[1:]), torch.nan)
    table, first = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32), 0
    for b, length in enumerate(lengths):
        for i in range(counts[b]):
            table[b, i] = order.pop()
            part = k[first + i * size : first + min((i + 1) * size, length)]
            pages[table[b, i], : len(part)] = part
        first += length
    return pages, table


LENGTHS = (3, 9)


def cache_parts(capacity: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of two sequences; what is not there yet is NaN."""
    k, v = normal(2, capacity, 2, 8, seed=1), normal(2, capacity, 2, 8, seed=2)
    for b, length in enumerate(LENGTHS):
        k[b, length:], v[b, length:] = torch.nan, torch.nan
    return k, v


def check_sequences(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    **options: Any,
) -> None:
    """Each sequence by itself, over its own keys (N, H, D)."""
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        check([out[b : b + 1], lse[b : b + 1]], dense(q[b : b + 1], k[None], v[None], **options))


def joined(cache: torch.Tensor, new: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    return [torch.cat((cache[b, :length], new[b])) for b, length in enumerate(lengths)]


def first_of(results: Callable[[torch.dtype], list[torch.Tensor]], dtype: torch.dtype) -> list[torch.Tensor]:
    return results(dtype)[:1]


X = torch.zeros(2, 4, 2, 8)
NEW = torch.zeros(2, 1, 2, 8)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
