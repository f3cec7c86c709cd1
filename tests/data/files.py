"""Image files and tars to read back."""

from __future__ import annotations

import io
import tarfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

RED, BLUE = (200, 30, 30), (30, 30, 200)


def png(colour: tuple[int, ...] = RED, size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGBA" if len(colour) == 4 else "RGB", size, colour).save(out, kind)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is this large."""
    whole = png()
    header = whole[12:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + whole[24:29]
    return whole[:12] + header + zlib.crc32(header).to_bytes(4, "big") + whole[33:]


def noise(seed: int, size: int = 64) -> bytes:
    """A PNG that does not compress."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def gray16() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(out, "PNG")
    return out.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path
