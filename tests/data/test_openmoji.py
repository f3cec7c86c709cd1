"""The images that pip installs: how many, the same bytes always, and what they show."""

from __future__ import annotations

import pytest
import torch

from assay.data.images import Captioned, openmoji
from assay.data.vocabulary import Vocabulary, split


@pytest.fixture(scope="module")
def emoji() -> Captioned:
    return openmoji(32)


def test_all_of_them_with_the_same_bytes_as_ever(emoji: Captioned) -> None:
    assert emoji.images.shape == (3944, 3, 32, 32)
    assert emoji.sha256() == "b34fb76d344fc09834c23473acf22a0932958acfcc5078fbaaa4b6fbb83b3f4a"
    assert emoji.name == "openmoji 17.0.0"
    assert "CC BY-SA 4.0" in emoji.attribution
    assert "OpenMoji" in emoji.attribution
    assert len(emoji.skipped) == 19
    assert "lighthouse: not a glyph of the font" in emoji.skipped


def test_they_show_what_they_say(emoji: Captioned) -> None:
    def middle(caption: str) -> list[int]:
        return emoji.images[emoji.captions.index(caption), :, 16, 16].tolist()

    red, green, blue = middle("red square")
    assert red > 150 > max(green, blue)
    red, green, blue = middle("blue square")
    assert blue > 150 > red
    assert "woman astronaut medium skin tone" in emoji.captions
    assert all(len(image.unique()) > 1 for image in emoji.images)
    assert len({image.numpy().tobytes() for image in emoji.images}) == 3779  # some emoji share a picture
    assert (emoji.images[:, :, 0, 0] == 255).all(dim=1).float().mean() > 0.99  # on white


def test_every_caption_fits_the_models(emoji: Captioned) -> None:
    vocabulary = Vocabulary.from_captions(emoji.captions)
    assert len(vocabulary) == 1744
    assert max(len(split(caption)) for caption in emoji.captions) == 13
    ids = torch.tensor([vocabulary.encode(caption, 16) for caption in emoji.captions])
    assert ids.shape == (3944, 16)
    assert (ids[:, 0] >= 2).all()
    assert (ids != 1).all()
    assert ids.max() == len(vocabulary) - 1
