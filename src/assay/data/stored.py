"""A set in one .npz file, for machines where nothing can be installed. Nothing is pickled."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from assay.data.captioned import Captioned
from assay.data.reading import printable


def save(captioned: Captioned, path: str | os.PathLike[str]) -> None:
    """Write the set whole or not at all: it is written beside its place and moved there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    words = {
        "name": captioned.name,
        "captions": captioned.captions,
        "attribution": captioned.attribution,
        "skipped": captioned.skipped,
    }
    text = np.frombuffer(json.dumps(words).encode(), np.uint8)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".npz")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, images=captioned.images.numpy(), words=text)
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def saved(path: str | os.PathLike[str]) -> Captioned:
    """The set that `save` wrote."""
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no .npz file")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                images, words = arrays["images"], json.loads(arrays["words"].tobytes())
        texts = [words["name"], words["attribution"], *words["captions"], *words["skipped"]]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a caption that is no text")
        return Captioned(
            words["name"],
            torch.from_numpy(images),
            tuple(words["captions"]),
            words["attribution"],
            tuple(words["skipped"]),
        )
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(
            f"{printable(os.fspath(path))} must be a set of images that `save` wrote, but: {error}. Save it again."
        ) from error
