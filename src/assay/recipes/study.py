"""What a study is, and how one is found by its name or in a user's file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from assay._suggest import did_you_mean
from assay.sweeps.grid import Sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Sweeps that answer a question together."""

    asked: str
    """The question, in a sentence or two, as the report shows it."""
    sweeps: tuple[Sweep, ...]

    def __post_init__(self) -> None:
        if not self.sweeps or not all(isinstance(sweep, Sweep) for sweep in self.sweeps):
            raise ValueError(f"A study needs at least one Sweep, got {self.sweeps!r}.")


def find_study(name: str) -> Study:
    """The study of a recipe: `quick`, `paper`, `full`, or `my_file.py` or `my_file.py:function`."""
    from assay.recipes import attention

    if ".py" in name:
        return _from_file(name)
    if name not in attention.RECIPES:
        hint = did_you_mean(name, attention.RECIPES)
        raise ValueError(
            f"Unknown recipe {name!r}. {hint}There are: {', '.join(attention.RECIPES)}; or a file of yours, "
            "my_file.py:function."
        )
    return attention.RECIPES[name]()


def _from_file(name: str) -> Study:
    """The user's own code, which they named: it is run."""
    file, colon, function = name.partition(".py:") if ".py:" in name else (name.removesuffix(".py"), "", "")
    path = Path(f"{file}.py")
    if not path.is_file():
        raise ValueError(f"There is no file {path}. A recipe of yours is named my_file.py:function.")
    spec = importlib.util.spec_from_file_location(f"_assay_recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in it look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    found = {key: value for key, value in vars(module).items() if _is_recipe(value, module.__name__)}
    if not colon and len(found) == 1:
        function = next(iter(found))
    if function not in found:
        what = f"no function {function!r}" if colon else f"{len(found)} functions"
        raise ValueError(f"{path} has {what}; name one of: {', '.join(found) or '(it has none)'}.")
    try:
        study = found[function]()
    except Exception as error:
        raise ValueError(f"The recipe {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise ValueError(f"The recipe {name} must return a Study, got {type(study).__name__}.")
    return study


def _is_recipe(value: object, module: str) -> bool:
    return isinstance(value, Callable) and getattr(value, "__module__", None) == module  # type: ignore[arg-type]
