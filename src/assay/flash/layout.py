"""How results lie in memory. One rule for what runs and for what torch.compile plans with: it must know the strides."""

from __future__ import annotations

from functools import lru_cache

import torch


def empty_output(q: torch.Tensor, dim: int) -> torch.Tensor:
    """For the output, whose head dimension is `dim`: in the order of q's strides where their shapes agree."""
    if q.shape[-1] == dim:
        out = torch.empty_like(q)
        if out.stride(-1) == 1:
            return out
    return q.new_empty(*q.shape[:3], dim)


def empty_gradient(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """For the gradient of a (B, H, N, D) tensor: on CUDA in the order of its strides, on the CPU (B, N, H, D).

    The latter is what PyTorch's kernel for CPUs gives: nothing is copied.
    """
    if x.device.type == "cpu":
        return empty_heads_last(x, x.shape, dtype)
    gradient = torch.empty_like(x, dtype=dtype)
    return gradient if gradient.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)


def empty_heads_last(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """(B, H, N, D), as (B, N, H, D) in memory. No view of that: torch refuses to write to a view that it recorded."""
    batch, heads, length, dim = shape
    strides = length * heads * dim, dim, heads * dim, 1
    return like.new_empty_strided((batch, heads, length, dim), strides, dtype=dtype)


def as_gradient(x: torch.Tensor) -> torch.Tensor:
    """`x`, on the CPU, as `empty_gradient` lays it out."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether the copy engine takes x: rows of whole 16 bytes, one element after the other."""
    return x.data_ptr() % 16 == 0 and _whole_rows(x.shape, x.stride(), x.element_size())


@lru_cache(4096)
def _whole_rows(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    outer = [stride for stride, length in zip(strides[:3], shape[:3], strict=True) if length > 1]
    return strides[3] == 1 and all(s > 0 and s * size % 16 == 0 for s in outer)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it that the copy engine takes."""
    if is_aligned(x):
        return x
    dim, whole = x.shape[3], 16 // x.element_size()
    copy = x.new_empty(*x.shape[:3], -(-dim // whole) * whole)[..., :dim]
    return copy.copy_(x)


def padded(dim: int) -> int:
    """The next power of two, from 16 on: the least that tensor cores take."""
    return max(16, 1 << (dim - 1).bit_length())
