"""Images with captions, whatever they came from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

import torch

LARGEST_SIZE = 1024


@dataclass(frozen=True, eq=False)
class Captioned:
    """A set of square images, each with its caption."""

    name: str
    images: torch.Tensor = field(repr=False)
    """uint8, (images, 3, size, size)."""
    captions: tuple[str, ...] = field(repr=False)
    attribution: str
    """Whose images these are and under which licence; shown wherever they are shown."""
    skipped: tuple[str, ...] = ()
    """What was left out, each with its reason."""

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        if self.images.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
            raise ValueError(f"Images must be uint8 (n, 3, size, size), got {self.images.dtype} {shape}.")
        if len(self.captions) != shape[0] or not shape[0]:
            raise ValueError(f"Each image has one caption, got {shape[0]} images and {len(self.captions)} captions.")

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def size(self) -> int:
        """Pixels of a side."""
        return self.images.shape[2]

    def sha256(self) -> str:
        """Of all pixels and captions: two sets with the same one train the same."""
        found = hashlib.sha256(self.images.contiguous().numpy().tobytes())
        found.update(json.dumps([self.size, self.captions]).encode())
        return found.hexdigest()


def check_size(size: object) -> int:
    """Pixels of a side, as a whole number that can be rendered."""
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_SIZE:
        raise ValueError(f"size must be a whole number of pixels, 1 to {LARGEST_SIZE}, got {size!r}.")
    return size
