"""Images cut into square patches, and put together again."""

from __future__ import annotations

import math

from torch import Tensor


def to_patches(images: Tensor, patch: int) -> Tensor:
    """(B, C, S, S) → (B, (S/patch)², C · patch²), row after row."""
    batch, channels, side = images.shape[0], images.shape[1], images.shape[2] // patch
    cut = images.reshape(batch, channels, side, patch, side, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, side * side, channels * patch * patch)


def from_patches(patches: Tensor, patch: int, channels: int) -> Tensor:
    """The images whose `to_patches` these are."""
    batch, side = patches.shape[0], math.isqrt(patches.shape[1])
    cut = patches.reshape(batch, side, side, channels, patch, patch)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, side * patch, side * patch)
