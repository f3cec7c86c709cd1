"""Sines and cosines of times and places, always computed in FP32, whatever the model's dtype.

They are made anew in every pass: as buffers they would be rounded by `model.bfloat16()`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_BASE = 10_000.0


class Angles(NamedTuple):
    """Rotary tables, (length, head dimension) each; both halves of a row are the same."""

    cos: Tensor
    sin: Tensor


def rotary_angles(length: int, dim: int, device: torch.device) -> Angles:
    """Position n turns the pair (i, i + dim/2) by n · 10000^(−2i/dim), as Llama does."""
    angles = _angles(torch.arange(length, device=device), dim // 2).repeat(1, 2)
    return Angles(angles.cos(), angles.sin())


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """x (B, H, N, D), each row turned by its position; at least in FP32, then rounded to the dtype of x."""
    first, second = x.chunk(2, dim=-1)
    return (x * angles.cos + torch.cat((-second, first), dim=-1) * angles.sin).to(x.dtype)


def sines(position: Tensor, width: int) -> Tensor:
    """(N,) → (N, width): cosines and sines of position · frequency, frequencies from 1 down to 1/10000."""
    angles = _angles(position, width // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def grid_sines(side: int, width: int, device: torch.device) -> Tensor:
    """(side², width): half of a row tells the patch's row in the image, half its column."""
    line = sines(torch.arange(side, device=device), width // 2)
    rows = line[:, None].expand(side, side, width // 2)
    columns = line[None, :].expand(side, side, width // 2)
    return torch.cat((rows, columns), dim=-1).flatten(0, 1)


def _angles(position: Tensor, count: int) -> Tensor:
    """(N, count). A product of broadcasts: an outer product by matmul would be rounded by autocast."""
    steps = torch.arange(count, device=position.device, dtype=torch.float32) / count
    return position.float()[:, None] * torch.pow(_BASE, -steps)
