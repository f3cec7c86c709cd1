"""FA3's FP8 scheme: scale Q, K and V into the range of a small format before rounding, undo it after.

Scales are one for the tensor, one a head, or one a block of rows. With `incoherent`, Q and K are first rotated by
the same random orthogonal matrix (signs, then Hadamard): Q·Kᵀ stays, and outliers are spread over the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from assay.formats.rounding import round_to
from assay.formats.spec import Format

Scales = Literal["tensor", "head", "block"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How the inputs are brought into the range of the plan's input format."""

    scales: Scales = "tensor"
    """What shares a scale."""
    incoherent: bool = False
    """Whether Q and K are rotated first; the head dimension must be a power of two."""
    seed: int = 0
    """Of the random signs of the rotation."""

    def __post_init__(self) -> None:
        if self.scales not in get_args(Scales):
            raise ValueError(f"Quantization: scales must be one of {get_args(Scales)}, got {self.scales!r}.")


def quantize(x: torch.Tensor, fmt: Format, scales: Scales, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of `fmt`, and the scales (B, H, N, 1) that multiply them back, for x (B, H, N, D)."""
    if fmt.bits > 8:
        raise ValueError(f"Quantization scales into formats of at most 8 bits, got inputs={fmt}. Leave it out.")
    finite = torch.isfinite(x)
    magnitude = torch.where(finite, x.abs(), 0.0)  # a NaN or inf must not set the scale of the others
    if scales == "tensor":
        largest = magnitude.amax().expand(*x.shape[:3], 1)
    elif scales == "head":
        largest = magnitude.amax((2, 3), keepdim=True).expand(*x.shape[:3], 1)
    else:
        rows = magnitude.amax(-1, keepdim=True)
        parts = [part.amax(2, keepdim=True).expand_as(part) for part in rows.split(block, dim=2)]
        largest = torch.cat(parts, dim=2)
    scale = torch.where(largest > 0, largest / fmt.max, 1.0)
    return torch.where(finite, round_to(x / scale, fmt, saturate=True), x), scale


def rotate(x: torch.Tensor, seed: int) -> torch.Tensor:
    """x·(signs · Hadamard / √D) over the last dimension, by the fast Walsh–Hadamard transform."""
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ValueError(
            f"Incoherent processing needs a head dimension that is a power of two, got {dim}. "
            "Pad the heads with zeros, or set incoherent=False."
        )
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (dim,), generator=generator).to(x) * 2 - 1
    x = x * signs
    width = 1
    while width < dim:
        pairs = x.reshape(*x.shape[:-1], dim // (2 * width), 2, width)
        even, odd = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((even + odd, even - odd), dim=-2).reshape(x.shape)
        width *= 2
    return x * float(dim**-0.5)
