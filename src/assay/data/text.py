"""Text as bytes, one token each."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from assay.data.bits import bits
from assay.data.reading import printable

PINNED = "1.14.0"
FILES = 854
SHA256 = "7f3ed17f95d6476a6c997c2065fb4b1e57dacc9e2ae4078aea619b7134e6cad6"
"""Of the Python source of sympy 1.14.0, tests left out: its files one after the other, by name."""
_WORDS = (
    "assay",
    "gold",
    "is",
    "weighed",
    "and",
    "found",
    "pure",
    "or",
    "not",
    "so",
    "the",
    "metal",
    "a",
    "fire",
    "of",
    "in",
)


@dataclass(frozen=True, eq=False)
class Text:
    """A corpus of bytes."""

    name: str
    tokens: torch.Tensor = field(repr=False)
    """uint8, (bytes,)."""
    attribution: str

    def __post_init__(self) -> None:
        if self.tokens.dtype != torch.uint8 or self.tokens.dim() != 1 or not len(self.tokens):
            shape = tuple(self.tokens.shape)
            raise ValueError(f"Tokens must be uint8 (n,), at least one; got {self.tokens.dtype} {shape}.")

    def rows(self, length: int) -> torch.Tensor:
        """(n, length): the text cut into pieces that do not overlap, without copying; a shorter rest is left out."""
        if not 1 <= length <= len(self.tokens):
            raise ValueError(f"length must be 1 to the text's {len(self.tokens)} tokens, got {length}.")
        whole = len(self.tokens) // length
        return self.tokens[: whole * length].view(whole, length)

    def sha256(self) -> str:
        """Of all tokens."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes()).hexdigest()


def python_source() -> Text:
    """The Python source of the installed sympy, which torch depends on; of version 1.14.0 always the same bytes."""
    found = importlib.util.find_spec("sympy")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"The Python corpus is sympy's source: pip install sympy=={PINNED}", name="sympy")
    folder = Path(found.submodule_search_locations[0])
    files = sorted(
        (path for path in folder.rglob("*.py") if "tests" not in path.parent.relative_to(folder).parts),
        key=lambda path: path.relative_to(folder).as_posix(),
    )
    data = bytearray().join(path.read_bytes() for path in files)
    if not data:
        raise ValueError(f"sympy must be installed with its source, but {folder} has no .py files. Install it again.")
    try:
        version = importlib.metadata.version("sympy")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    name = f"Python source of sympy {version}"
    if version != PINNED:
        name += f" (not {PINNED}: another corpus)"
    text = Text(
        name, torch.frombuffer(data, dtype=torch.uint8), f"sympy {version}, SymPy Development Team, BSD licence."
    )
    if version == PINNED and (len(files), text.sha256()) != (FILES, SHA256):
        raise ValueError(
            f"sympy {PINNED} must be as published, {FILES} files with the sha256 {SHA256[:12]}…, got {len(files)} "
            f"with {text.sha256()[:12]}…. Install it again: pip install --force-reinstall --no-deps sympy=={PINNED}"
        )
    return text


def from_file(path: str | os.PathLike[str]) -> Text:
    """A file's bytes, whatever its encoding."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"A text is read from a file, but {printable(str(path))} is none. Give its path.")
    try:
        data = bytearray(path.read_bytes())
    except OSError as error:
        raise ValueError(f"A text must be readable, but {printable(str(path))}: {error.strerror}.") from error
    if not data:
        raise ValueError(f"A text must have at least one byte, but {printable(str(path))} is empty.")
    name = printable(path.name)
    return Text(name, torch.frombuffer(data, dtype=torch.uint8), f"Text: {name}, provided by the user.")


def synthetic(length: int, seed: int) -> Text:
    """Words at random, `length` bytes of them, for unit tests."""
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}.")
    words = [_WORDS[draw] for draw in (bits(length, seed) >> 60).tolist()]
    data = bytearray(" ".join(words)[:length], "ascii")
    return Text("synthetic words", torch.frombuffer(data, dtype=torch.uint8), "Made by Assay.")
