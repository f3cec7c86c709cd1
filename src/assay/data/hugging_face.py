"""A Hugging Face dataset that is on the disk: saved with `save_to_disk`, or the Parquet files of a repository.

Its files are read with pyarrow, which `datasets` brings; no code of the dataset runs, nothing is downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.data import captions
from assay.data.captioned import Captioned
from assay.data.decoding import needed
from assay.data.gathering import Gathering, own
from assay.data.reading import printable

_IMAGE_KEYS = ("image", "img", "png", "jpg", "jpeg", "webp")
_LOOKED_FOR = (
    f"rows with an image ({', '.join(_IMAGE_KEYS)}) and a caption ({', '.join(captions.CAPTION_KEYS)}), "
    "the image's bytes inside"
)
_ROWS = 64


def from_hugging_face(path: str | os.PathLike[str], size: int) -> Captioned:
    """The images of one split, in its order: a folder from `save_to_disk`, Parquet files, or folder/split of these."""
    needed("pyarrow", "Reading a Hugging Face dataset", "datasets")
    path = Path(path)
    gathering = Gathering(size)
    told: dict[str, str] = {}
    for file in _files_of_split(path):
        row = -1
        try:
            for row, values in enumerate(_rows(file)):
                name = f"{file.name} row {row}"
                data, caption = _image_bytes(values), captions.from_object(values)
                if data is None:
                    gathering.skip(name, "no bytes of an image")
                elif caption is None:
                    gathering.skip(name, "no caption")
                else:
                    told[name] = caption
                    gathering.add(name, name, data)
        except (OSError, ValueError, needed("pyarrow", "").ArrowException) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            gathering.skip(f"{file.name} after row {row}", f"broken, not read further ({printable(reason)})")
    name = path.resolve().name
    return gathering.finish(name, told, own(name), _LOOKED_FOR)


def _files_of_split(path: Path) -> list[Path]:
    """The files of the one split there is, in the order of their numbers."""
    if path.is_file():
        return [path]
    splits = _splits(path)
    if not splits and not path.exists():
        splits = {name: files for name, files in _splits(path.parent).items() if name == path}
    if not splits:
        raise ValueError(
            f"A Hugging Face dataset is a folder with .arrow or .parquet files, but {printable(str(path))} has none. "
            "Save it with save_to_disk, and give that folder."
        )
    if len(splits) > 1:
        choices = ", ".join(printable(str(name)) for name in splits)
        raise ValueError(f"One split is read, but {printable(str(path))} has {len(splits)}. Give one: {choices}.")
    return next(iter(splits.values()))


def _splits(folder: Path) -> dict[Path, list[Path]]:
    """Split → files. train-00000-of-00002.parquet is of the split train; data-… and dataset.arrow of their folder."""
    found: dict[Path, list[Path]] = {}
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".arrow", ".parquet")) and not name.startswith("cache-"):
                prefix = re.sub(r"-\d+-of-\d+$", "", Path(name).stem)
                split = Path(where) if prefix in ("data", "dataset") else Path(where) / prefix
                found.setdefault(split, []).append(Path(where) / name)
    return found


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    pyarrow = needed("pyarrow", "")
    with pyarrow.memory_map(str(file)) as source:
        if file.suffix == ".parquet":
            table = needed("pyarrow.parquet", "").ParquetFile(source)
            wanted = [name for name in table.schema_arrow.names if name in (*_IMAGE_KEYS, *captions.CAPTION_KEYS)]
            batches = table.iter_batches(batch_size=_ROWS, columns=wanted)
        else:
            batches = needed("pyarrow.ipc", "").open_stream(source)
        for batch in batches:
            names = [name for name in batch.schema.names if name in (*_IMAGE_KEYS, *captions.CAPTION_KEYS)]
            for index in range(batch.num_rows):
                yield {name: batch.column(name)[index].as_py() for name in names}


def _image_bytes(values: dict[str, Any]) -> bytes | None:
    """An image is {"bytes", "path"} or bytes; a path is not followed, it may lead anywhere."""
    value = next((values[key] for key in _IMAGE_KEYS if values.get(key) is not None), None)
    data = value.get("bytes") if isinstance(value, dict) else value
    return data if isinstance(data, bytes) and data else None
