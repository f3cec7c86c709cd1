"""Sets in a file, and the synthetic one."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.data.images import Captioned, save, saved, synthetic
from assay.data.shapes import COLOURS


def test_a_set_comes_back_as_it_was(tmp_path: Path) -> None:
    before = synthetic(20, 12, 3)
    before = Captioned("é", before.images, ("naïve 🦊", *before.captions[1:]), "CC BY", ("a.png: broken",))
    save(before, tmp_path / "new" / "set.npz")
    after = saved(tmp_path / "new" / "set.npz")
    assert torch.equal(after.images, before.images)
    assert (after.name, after.captions, after.attribution, after.skipped) == (
        before.name,
        before.captions,
        before.attribution,
        before.skipped,
    )
    assert after.sha256() == before.sha256()
    assert (len(after), after.size) == (20, 12)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(synthetic(2, 8, 0), tmp_path / "set.npz")
    before = (tmp_path / "set.npz").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        save(synthetic(3, 8, 1), tmp_path / "set.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["set.npz"]
    assert (tmp_path / "set.npz").read_bytes() == before


def npz(**arrays: object) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


IMAGES = np.zeros((1, 3, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "No such file"),
        (b"", "no .npz"),
        (b"nonsense", "no .npz"),
        (npz(images=IMAGES), "words"),
        (npz(images=np.array([{}], object), words=np.zeros(2, np.uint8)), "allow_pickle=False"),
        (npz(images=IMAGES, words=np.frombuffer(b"[]", np.uint8)), "list"),
        (npz(images=IMAGES, words=np.frombuffer(b"{", np.uint8)), "Expecting"),
        (
            npz(
                images=IMAGES,
                words=np.frombuffer(b'{"name":"","captions":[1],"attribution":"","skipped":[]}', np.uint8),
            ),
            "text",
        ),
        (
            npz(
                images=IMAGES, words=np.frombuffer(b'{"name":"","captions":[],"attribution":"","skipped":[]}', np.uint8)
            ),
            "0 cap",
        ),
    ],
)
def test_no_such_set(tmp_path: Path, data: bytes | None, reason: str) -> None:
    if data is not None:
        (tmp_path / "set.npz").write_bytes(data)
    with pytest.raises(ValueError, match=rf"set.npz must be a set of images that `save` wrote, but: .*{reason}"):
        saved(tmp_path / "set.npz")


def test_damage_is_found(tmp_path: Path) -> None:
    save(synthetic(4, 8, 0), tmp_path / "set.npz")
    whole = (tmp_path / "set.npz").read_bytes()
    for where in range(70, len(whole) // 2, 37):
        (tmp_path / "bad.npz").write_bytes(whole[:where] + bytes([whole[where] ^ 255]) + whole[where + 1 :])
        with contextlib.suppress(ValueError):
            assert saved(tmp_path / "bad.npz").sha256() == saved(tmp_path / "set.npz").sha256()
    (tmp_path / "bad.npz").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="Save it again"):
        saved(tmp_path / "bad.npz")


def test_synthetic_captions_are_true() -> None:
    found = synthetic(60, 24, 7)
    assert found.images.shape == (60, 3, 24, 24)
    assert len(set(found.captions)) > 15
    for image, caption in zip(found.images, found.captions, strict=True):
        extent, colour, shape = caption.split()
        inked = (image != 255).any(dim=0)
        assert {tuple(pixel) for pixel in image[:, inked].T.tolist()} == {COLOURS[colour]}
        rows, columns = inked.any(dim=1).sum().item(), inked.any(dim=0).sum().item()
        assert abs(rows - columns) <= 1
        assert (rows > 15) == (extent == "large")
        filled = inked.sum().item() / (rows * columns)
        assert {"square": filled == 1, "circle": 0.7 < filled < 0.9, "cross": filled < 0.7}[shape], (caption, filled)


def test_synthetic_depends_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one = synthetic(30, 8, 1)
    torch.manual_seed(5)
    assert one.sha256() == synthetic(30, 8, 1).sha256()
    assert one.sha256() != synthetic(30, 8, 2).sha256()
    assert one.sha256() == "b63e152137f5f53cdbbdc1e85058b0919ad089065c23bc69b1a5d38e2a3d6fd3"
    torch.set_rng_state(state)
    with pytest.raises(ValueError, match="count must be at least 1"):
        synthetic(0, 8, 0)


def test_a_set_is_checked() -> None:
    with pytest.raises(ValueError, match="1 images and 2 captions"):
        Captioned("x", torch.zeros(1, 3, 4, 4, dtype=torch.uint8), ("a", "b"), "")
    with pytest.raises(ValueError, match=r"uint8 .* got torch.float32 \(1, 3, 4, 4\)"):
        Captioned("x", torch.zeros(1, 3, 4, 4), ("a",), "")
