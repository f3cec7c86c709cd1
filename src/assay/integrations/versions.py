"""Libraries that Assay can do without: there and of a version that we know, or an error that says what to install."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any


def needed(name: str, first: tuple[int, ...], beyond: tuple[int, ...], package: str | None = None) -> Any:
    """The module `name`, of a version from `first` up to `beyond`; `package` is what pip calls it, if not the same."""
    supported = f"{package or name}>={_written(first)},<{_written(beyond)}"
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # it is there, and misses something itself
            raise
        module = None
    version = getattr(module, "__version__", None)  # a mere folder of that name, as W&B leaves one, has none
    if version is None:
        raise ImportError(f"{name} is needed, but not installed: pip install '{supported}'.", name=name)
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(version))[: len(first)])
    if not first <= numbers < beyond:
        raise ValueError(f"{name} must be of the range {supported}, got {version}: pip install '{supported}'.")
    return module


def _written(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
