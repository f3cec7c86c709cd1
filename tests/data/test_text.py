"""Corpora of bytes."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from pathlib import Path

import pytest
import torch

from assay.data import text


def test_the_python_corpus_is_what_was_published() -> None:
    corpus = text.python_source()
    assert corpus.name == "Python source of sympy 1.14.0"
    assert "BSD" in corpus.attribution
    recorded = {str(file): file for file in importlib.metadata.files("sympy") or []}
    names = sorted(
        name for name in recorded if name.startswith("sympy/") and name.endswith(".py") and "/tests/" not in name
    )
    assert len(names) == text.FILES
    start = 0
    data = corpus.tokens.numpy().tobytes()
    for name in names:
        size, digest = recorded[name].size, recorded[name].hash
        assert size is not None
        assert digest is not None
        found = hashlib.sha256(data[start : start + size]).digest()
        assert base64.urlsafe_b64encode(found).rstrip(b"=").decode() == digest.value, name
        start += size
    assert start == len(data) == 16_612_271


def fake_sympy(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name, body in (("__init__.py", "one\n"), ("tests/test.py", "no\n"), ("b/x.py", "three\n"), ("b.py", "two\n")):
        (folder / "sympy" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sympy" / name).write_bytes(body.encode())
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.delitem(__import__("sys").modules, "sympy", raising=False)


def test_another_version_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sympy(tmp_path, monkeypatch, "1.13.3")
    corpus = text.python_source()
    assert corpus.name == "Python source of sympy 1.13.3 (not 1.14.0: another corpus)"
    assert corpus.tokens.numpy().tobytes() == b"one\ntwo\nthree\n"


def test_the_pinned_version_must_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sympy(tmp_path, monkeypatch, "1.14.0")
    with pytest.raises(ValueError, match=r"must be as published, 854 files .* got 3 .*--force-reinstall"):
        text.python_source()


def test_a_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3 + b"rest"
    (tmp_path / "a.bin").write_bytes(data)
    corpus = text.from_file(tmp_path / "a.bin")
    assert (corpus.name, corpus.tokens.dtype) == ("a.bin", torch.uint8)
    assert corpus.tokens.tolist() == list(data)
    assert corpus.sha256() == hashlib.sha256(data).hexdigest()
    assert torch.equal(corpus.rows(256), torch.arange(256, dtype=torch.uint8).expand(3, 256))
    for length in (0, 773):
        with pytest.raises(ValueError, match=r"1 to the text's 772"):
            corpus.rows(length)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"from a file, but .* is none"):
        text.from_file(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty is empty"):
        text.from_file(tmp_path / "empty")


def test_synthetic() -> None:
    one = text.synthetic(1000, 4)
    assert len(one.tokens) == 1000
    assert one.sha256() == text.synthetic(1000, 4).sha256()
    assert one.sha256() != text.synthetic(1000, 5).sha256()
    assert torch.equal(one.tokens[:300], text.synthetic(300, 4).tokens)
    assert set(bytes(one.tokens.tolist()).decode().split()[:-1]) <= set(text._WORDS)
    with pytest.raises(ValueError, match=r"length must be at least 1"):
        text.synthetic(0, 4)
    with pytest.raises(ValueError, match=r"seed must be a whole number of at least 0, got -1"):
        text.synthetic(5, -1)
