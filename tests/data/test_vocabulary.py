"""Words and ids."""

from __future__ import annotations

import random

import pytest

from assay.data.vocabulary import Vocabulary, split

CAPTIONS = ["A red fox", "red RED, fox!", "the fox's den", "blue_sky ２"]


def test_frequent_words_come_first_then_the_alphabet() -> None:
    vocabulary = Vocabulary.from_captions(CAPTIONS)
    assert vocabulary.words == ("red", "fox", "2", "a", "blue", "den", "fox's", "sky", "the")
    assert len(vocabulary) == 11
    mixed = list(CAPTIONS)
    random.Random(0).shuffle(mixed)
    assert Vocabulary.from_captions(mixed) == vocabulary
    assert Vocabulary.from_captions(iter(CAPTIONS), most=4).words == ("red", "fox")


def test_encoding() -> None:
    vocabulary = Vocabulary(("red", "fox"))
    assert vocabulary.encode("Red, green FOX", 5) == [2, 1, 3, 0, 0]
    assert vocabulary.encode("fox red fox", 2) == [3, 2]
    assert vocabulary.encode("", 3) == [0, 0, 0]
    assert split("medium-light e\u0301t\u00e9") == ["medium", "light", "été"]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="needs captions with words"):
        Vocabulary.from_captions(["…", ""])
    with pytest.raises(ValueError, match="at least 3; got 2"):
        Vocabulary.from_captions(CAPTIONS, most=2)
    with pytest.raises(ValueError, match="'a' more than once"):
        Vocabulary(("a", "b", "a"))
