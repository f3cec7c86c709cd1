"""Coloured shapes with true captions, for unit tests."""

from __future__ import annotations

import numpy as np
import torch

from assay.data.bits import bits
from assay.data.captioned import Captioned, check_size

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "cross")
SIZES = {"large": 0.8, "small": 0.45}


def synthetic(count: int, size: int, seed: int) -> Captioned:
    """`count` images like "large red circle", one shape each on white, somewhere in the picture."""
    check_size(size)
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    kinds: tuple[tuple[str, ...], ...] = (tuple(COLOURS), SHAPES, tuple(SIZES))
    images, captions = [], []
    for draws in bits(5 * count, seed).reshape(count, 5):
        colour, shape, extent = (
            kind[int(draw % len(kind))] for kind, draw in zip(kinds, draws[:3].tolist(), strict=True)
        )
        reach = SIZES[extent]
        x, y = (reach + (2 - 2 * reach) * (draw % 1024) / 1023 - 1 for draw in draws[3:].tolist())
        images.append(_picture(shape, COLOURS[colour], reach, (x, y), size))
        captions.append(f"{extent} {colour} {shape}")
    return Captioned("synthetic shapes", torch.stack(images), tuple(captions), "Made by Assay.")


def _picture(
    shape: str, colour: tuple[int, int, int], reach: float, centre: tuple[float, float], size: int
) -> torch.Tensor:
    """One shape on white; the picture spans −1 to 1 both ways."""
    pixels = (np.arange(size) + 0.5) / size * 2 - 1
    x, y = abs(pixels[None, :] - centre[0]) / reach, abs(pixels[:, None] - centre[1]) / reach
    inside = {
        "circle": x * x + y * y <= 1,
        "square": np.maximum(x, y) <= 1,
        "cross": (np.maximum(x, y) <= 1) & (np.minimum(x, y) <= 0.3),
    }[shape]
    picture = np.where(inside, np.array(colour, np.uint8)[:, None, None], np.uint8(255))
    return torch.from_numpy(np.ascontiguousarray(picture))
