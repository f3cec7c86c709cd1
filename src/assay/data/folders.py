"""A folder of images, with captions beside them or in a table."""

from __future__ import annotations

import os
from pathlib import Path

from assay.data import captions
from assay.data.captioned import Captioned
from assay.data.decoding import SUFFIXES
from assay.data.gathering import Gathering, own
from assay.data.reading import LARGEST_CAPTION, LARGEST_IMAGE, UnreadableError, printable, read

_TABLES = ("captions.csv", "captions.jsonl")
_LARGEST_TABLE = 2**30
_LOOKED_FOR = (
    f"images ({', '.join(SUFFIXES)}), in it or below, with captions: name.txt beside name.png, "
    "or captions.csv or captions.jsonl with file_name and caption"
)


def from_folder(path: str | os.PathLike[str], size: int) -> Captioned:
    """The images in a folder and below it, by name. A caption beside an image goes before one in the table."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"Images are read from a folder, but {printable(str(folder))} is none. Give its path.")
    gathering = Gathering(size)
    files = _files_below(folder)
    images = [name for name in files if name.lower().endswith(SUFFIXES)]
    told = _from_tables(folder, set(images), gathering)
    for name in images:
        beside = _beside(folder, name, set(files), gathering)
        if beside is not None:
            told[name] = beside
        if name not in told:
            gathering.skip(name, "no caption")
            continue
        try:
            gathering.add(name, name, read(folder / name, LARGEST_IMAGE))
        except UnreadableError as error:
            gathering.skip(name, str(error))
    name = folder.resolve().name
    return gathering.finish(name, told, own(name), _LOOKED_FOR)


def _files_below(folder: Path) -> list[str]:
    """Names relative to the folder, with "/", sorted. Links to folders are not followed: they may lead in circles."""
    found = []
    for where, _, names in os.walk(folder):
        found += [(Path(where) / name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def _beside(folder: Path, image: str, files: set[str], gathering: Gathering) -> str | None:
    name = image[: image.rindex(".")] + ".txt"
    if name not in files:
        return None
    try:
        return captions.from_text(read(folder / name, LARGEST_CAPTION))
    except UnreadableError as error:
        gathering.skip(name, str(error))
        return None


def _from_tables(folder: Path, images: set[str], gathering: Gathering) -> dict[str, str]:
    found: dict[str, str] = {}
    tables = [name for name in _TABLES if (folder / name).exists()]
    if len(tables) > 1:
        raise ValueError(f"A folder has one table of captions, but {folder} has {' and '.join(tables)}. Remove one.")
    for name in tables:
        try:
            rows = list(captions.from_table(read(folder / name, _LARGEST_TABLE), Path(name).suffix))
        except ValueError as error:
            raise ValueError(f"{printable(str(folder / name))} cannot be read. {error}") from error
        for where, image, caption in rows:
            if image is None or caption is None:
                gathering.skip(f"{name} {where}", "no image or no caption named")
            elif image not in images:
                gathering.skip(f"{name} {where}", f"no image {printable(image)} in the folder")
            else:
                found.setdefault(image, caption)
    return found
