"""A recipe by its name, or in a user's own file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from assay._suggest import did_you_mean

Recipe = TypeVar("Recipe")


def find_recipe(name: str, known: Mapping[str, Callable[[], Recipe]], kind: type[Recipe]) -> Recipe:
    """What the recipe makes: one of the known, or `my_file.py` or `my_file.py:function`."""
    if ".py" in name:
        return _from_file(name, kind)
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(
            f"Unknown recipe {name!r}. {hint}There are: {', '.join(known)}; or a file of yours, my_file.py:function."
        )
    return known[name]()


def _from_file(name: str, kind: type[Recipe]) -> Recipe:
    """The user's own code, which they named: it is run."""
    file, colon, function = name.partition(".py:") if ".py:" in name else (name.removesuffix(".py"), "", "")
    path = Path(f"{file}.py")
    if not path.is_file():
        raise ValueError(f"There is no file {path}. A recipe of yours is named my_file.py:function.")
    module = _run(path)
    found = {key: value for key, value in vars(module).items() if _is_recipe(value, module.__name__)}
    if not colon and len(found) == 1:
        function = next(iter(found))
    if function not in found:
        what = f"no function {function!r}" if colon else f"{len(found)} functions"
        raise ValueError(f"{path} has {what}; name one of: {', '.join(found) or '(it has none)'}.")
    try:
        made = found[function]()
    except Exception as error:
        raise ValueError(f"The recipe {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, kind):
        raise ValueError(f"The recipe {name} must return a {kind.__name__}, got {type(made).__name__}.")
    return made


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_assay_recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in it look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    return module


def _is_recipe(value: object, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module
