"""Captions as numbers."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

EMPTY = 0
"""No word: what fills a caption up, and the whole of an empty one."""
UNKNOWN = 1
"""A word that the vocabulary does not have."""
_FIRST = 2
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


@dataclass(frozen=True)
class Vocabulary:
    """Words and their ids; the first word has the id 2."""

    words: tuple[str, ...] = field(repr=False)
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: index for index, word in enumerate(self.words, _FIRST)}
        if len(ids) != len(self.words):
            twice = next(word for word, times in Counter(self.words).items() if times > 1)
            raise ValueError(f"A vocabulary has each word once, got {twice!r} more than once.")
        object.__setattr__(self, "_ids", ids)

    @classmethod
    def from_captions(cls, captions: Iterable[str], most: int = 2048) -> Self:
        """The most frequent words, `most` ids in all; where two are as frequent, by the alphabet."""
        if most <= _FIRST:
            raise ValueError(f"most must leave room for a word beside empty and unknown, at least 3; got {most}.")
        counts = Counter(word for caption in captions for word in split(caption))
        if not counts:
            raise ValueError("A vocabulary needs captions with words in them, got none. Look at the captions.")
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(tuple(ordered[: most - _FIRST]))

    def __len__(self) -> int:
        return len(self.words) + _FIRST

    def encode(self, caption: str, length: int) -> list[int]:
        """The caption's first `length` words as ids, filled up with 0."""
        ids = [self._ids.get(word, UNKNOWN) for word in split(caption)[:length]]
        return ids + [EMPTY] * (length - len(ids))


def split(caption: str) -> list[str]:
    """The words of a caption, in small letters; what is between them is left out."""
    return _WORD.findall(unicodedata.normalize("NFKC", caption).casefold())
