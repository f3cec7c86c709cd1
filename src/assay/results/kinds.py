"""All kinds of records that a folder may hold."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from assay.results.record import POINTS
from assay.results.schema import Schema
from assay.results.training_record import TRAINING
from assay.results.watch_record import WATCH

KINDS: tuple[Schema, ...] = (POINTS, TRAINING, WATCH)


def kinds_in(folder: Path) -> list[Schema]:
    """The kinds that have files in the folder; points where none has."""
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return [kind for kind in KINDS if any(map(kind.owns, names))] or [POINTS]


def kind_with(columns: Collection[str]) -> Schema | None:
    """The kind that has these columns and no other."""
    return next((kind for kind in KINDS if kind.columns.keys() == set(columns)), None)
