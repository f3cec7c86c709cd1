"""What a study is, and how one is found by its name or in a user's file."""

from __future__ import annotations

from dataclasses import dataclass

from assay.recipes.files import find_recipe
from assay.sweeps.grid import Sweep
from assay.training.training import PairStudy


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Sweeps, and paired trainings, that answer a question together."""

    asked: str
    """The question, in a sentence or two, as the report shows it."""
    sweeps: tuple[Sweep, ...]
    pairs: PairStudy | None = None

    def __post_init__(self) -> None:
        if not self.sweeps or not all(isinstance(sweep, Sweep) for sweep in self.sweeps):
            raise ValueError(f"A study needs at least one Sweep, got {self.sweeps!r}.")


def find_study(name: str) -> Study:
    """The study of a recipe: `quick`, `paper`, `full`, or `my_file.py` or `my_file.py:function`."""
    from assay.recipes import attention

    return find_recipe(name, attention.RECIPES, Study)
