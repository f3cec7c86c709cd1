"""Bytes of an image file → a square of pixels."""

from __future__ import annotations

import importlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.data.reading import LARGEST_IMAGE, UnreadableError, check_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow runs other programs for some of the rest
LARGEST_PIXELS = 2**26


def needed(module: str, purpose: str, package: str = "'assay[data]'") -> Any:
    """An optional module, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).split(".")[0]
        raise ModuleNotFoundError(f"{purpose} needs {missing}: pip install {package}", name=missing) from None


def decode(data: bytes, size: int) -> np.ndarray:
    """uint8 (3, size, size): the middle square of an image, on white where it is transparent.

    UnreadableError says why an image cannot be used.
    """
    opener = needed("PIL.Image", "Reading images")
    try:
        check_bytes(len(data), LARGEST_IMAGE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked here, and odd metadata does not matter
            with opener.open(io.BytesIO(data), formats=_FORMATS) as image:
                if image.width * image.height > LARGEST_PIXELS:
                    raise UnreadableError(f"{image.width}×{image.height} pixels, more than {LARGEST_PIXELS}")
                if image.mode == "F" or image.mode.startswith("I"):
                    raise UnreadableError(f"more than 8 bits a channel (mode {image.mode})")
                return square(_on_white(image), size)
    except UnreadableError:
        raise
    except opener.DecompressionBombError as error:
        raise UnreadableError(f"more than {LARGEST_PIXELS} pixels") from error
    except Exception as error:  # a decoder raises all kinds of things when its file is broken
        raise UnreadableError("no image of a known format, or a broken one") from error


def square(image: Image, size: int) -> np.ndarray:
    """uint8 (3, size, size): the middle of an RGB image, made larger or smaller. The same bytes on every machine."""
    bicubic = needed("PIL.Image", "Reading images").Resampling.BICUBIC
    side = min(image.width, image.height)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    small = image.resize((size, size), bicubic, box=(left, top, left + side, top + side))
    return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))


def _on_white(image: Image) -> Image:
    upright = needed("PIL.ImageOps", "Reading images").exif_transpose(image)
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        white = needed("PIL.Image", "Reading images").new("RGBA", layer.size, "white")
        white.alpha_composite(layer)
        upright = white
    rgb: Image = upright.convert("RGB")
    return rgb
