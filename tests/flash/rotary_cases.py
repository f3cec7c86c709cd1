"""Inputs for the tests of rotary embedding, and the rotation as a product of complex numbers in FP64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch

from assay.flash.rotary import Rotary

POSITIONS = 48


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One call of the operator; packed: `lengths` of the sequences."""

    shape: tuple[int, int, int, int] = (2, 3, 21, 16)
    half: int = 8
    interleaved: bool = False
    offsets: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    transposed: bool = False
    """(B, N, H, D) in memory, with a last dimension that is not dense."""
    inverse: bool = False

    def x(self, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        batch, heads, rows, dim = self.shape
        if self.transposed:
            wide = torch.randn(batch, rows, heads, 2 * dim, generator=generator, dtype=torch.float64)
            return wide.to(dtype).transpose(1, 2)[..., ::2]
        return torch.randn(self.shape, generator=generator, dtype=torch.float64).to(dtype)

    def cu_seqlens(self) -> torch.Tensor | None:
        if self.lengths is None:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)

    def positions(self) -> torch.Tensor:
        """(B, N), counted one by one."""
        sequences, offsets = len(self.lengths or range(self.shape[0])), self.offsets
        starts = offsets or (0,) * sequences
        lengths = self.lengths or (self.shape[2],) * sequences
        rows = [[start + i for i in range(length)] for start, length in zip(starts, lengths, strict=True)]
        return torch.tensor([list(chain.from_iterable(rows))] if self.lengths else rows)

    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Offsets and cu_seqlens, as the operator takes them."""
        offsets = None if self.offsets is None else torch.tensor(self.offsets, dtype=torch.int32)
        return offsets, self.cu_seqlens()


CASES = {
    "plain": Turn(),
    "interleaved": Turn(interleaved=True),
    "part of the dimensions": Turn(half=3),
    "part, interleaved": Turn(half=5, interleaved=True),
    "odd dimension": Turn(shape=(1, 2, 7, 59), half=29),
    "odd dimension, interleaved": Turn(shape=(1, 2, 7, 59), half=20, interleaved=True),
    "large": Turn(shape=(1, 1, 40, 256), half=128),
    "large, interleaved": Turn(shape=(1, 1, 40, 256), half=128, interleaved=True),
    "offsets": Turn(offsets=(27, 4)),
    "before 0": Turn(offsets=(-9, 3), interleaved=True),
    "transposed": Turn(transposed=True, half=6),
    "transposed, interleaved": Turn(transposed=True, interleaved=True, offsets=(1, 2)),
    "packed": Turn(shape=(1, 2, 60, 16), lengths=(30, 0, 7, 23)),
    "packed, offsets": Turn(shape=(1, 2, 41, 12), half=5, lengths=(3, 37, 0, 1), offsets=(40, -2, 5, -7)),
    "one row": Turn(shape=(3, 2, 1, 8), half=4, offsets=(0, 47, 5)),
    "inverse": Turn(inverse=True, interleaved=True),
    "nothing": Turn(shape=(2, 3, 0, 16)),
}


def frequencies(half: int) -> torch.Tensor:
    return 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)


def tables(half: int, dtype: torch.dtype = torch.float64, positions: int = POSITIONS) -> Rotary:
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies(half)
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))


def by_complex_numbers(
    x: torch.Tensor, positions: torch.Tensor, half: int, interleaved: bool, inverse: bool = False
) -> torch.Tensor:
    """x (B, H, N, D) with every pair multiplied by e^(i·position·frequency), in FP64."""
    angles = positions[:, None, :, None] * frequencies(half)
    factor = torch.polar(torch.ones_like(angles), -angles if inverse else angles)
    turned, rest = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    last = (half, 2) if interleaved else (2, half)
    pairs = turned.unflatten(-1, last) if interleaved else turned.unflatten(-1, last).mT
    pairs = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * factor)
    return torch.cat(((pairs if interleaved else pairs.mT).flatten(-2), rest), -1)
