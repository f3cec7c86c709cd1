"""Images as they come from a folder, a tar or a table; those that can be read and have captions become a set."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from assay.data.captioned import Captioned, check_size
from assay.data.decoding import decode
from assay.data.reading import UnreadableError, printable

_SHOWN = 3


class Gathering:
    """Decoded images by key, and what was left out."""

    def __init__(self, size: int) -> None:
        self.size = check_size(size)
        self._names: dict[str, str] = {}  # key → name, in the order of the images
        self._pixels = bytearray()
        self._skipped: list[str] = []

    def add(self, key: str, name: str, data: bytes) -> None:
        """Decode an image and keep it, or note why not. Of a key's images the first is kept."""
        if key in self._names:
            self.skip(name, f"{printable(self._names[key])} is the image of this caption")
            return
        try:
            self._pixels += decode(data, self.size).tobytes()
        except UnreadableError as error:
            self.skip(name, str(error))
        else:
            self._names[key] = name

    def skip(self, name: str, reason: str) -> None:
        """Note what is left out, and why."""
        self._skipped.append(f"{printable(name)}: {reason}")

    def finish(self, name: str, captions: Mapping[str, str], attribution: str, looked_for: str) -> Captioned:
        """The images that have captions, in the order they came; a ValueError if there are none."""
        kept = [index for index, key in enumerate(self._names) if key in captions]
        for key, image in self._names.items():
            if key not in captions:
                self.skip(image, "no caption")
        if not kept:
            raise ValueError(f"{printable(name)} must hold {looked_for}; none were found.{self._left_out()}")
        images = torch.frombuffer(self._pixels, dtype=torch.uint8).reshape(-1, 3, self.size, self.size)
        if len(kept) < len(images):
            images = images[kept]
        texts = tuple(captions[key] for key in self._names if key in captions)
        return Captioned(printable(name), images, texts, attribution, tuple(self._skipped))

    def _left_out(self) -> str:
        if not self._skipped:
            return ""
        more = f" and {len(self._skipped) - _SHOWN} more" if len(self._skipped) > _SHOWN else ""
        return f" Left out: {'; '.join(self._skipped[:_SHOWN])}{more}."


def own(name: str) -> str:
    """The attribution of images that the user brought."""
    return f"Images and captions: {printable(name)}, provided by the user."
