"""Recipes by name and from a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.recipes.attention import RECIPES
from assay.recipes.study import find_study

OWN = """
from assay.recipes.study import Study
from assay.sweeps.grid import default_sweep

def mine():
    return Study(asked="Mine?", sweeps=(default_sweep("inputs", seeds=2),))
"""


@pytest.mark.parametrize("name", RECIPES)
def test_the_known_ones(name: str) -> None:
    study = find_study(name)
    assert {sweep.name for sweep in study.sweeps} == {"precision", "length", "blocks", "steps", "inputs", "kernels"}
    assert all(sweep.points("cpu") for sweep in study.sweeps)


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "my study.py"
    path.write_text(OWN)
    assert find_study(str(path)).asked == "Mine?"
    assert find_study(f"{path}:mine").sweeps[0].seeds == 2
    path.write_text(OWN + "\ndef other():\n    return 3\n")
    with pytest.raises(ValueError, match="has 2 functions; name one of: mine, other"):
        find_study(str(path))
    with pytest.raises(ValueError, match="no function 'nine'; name one of: mine, other"):
        find_study(f"{path}:nine")
    with pytest.raises(ValueError, match="must return a Study, got int"):
        find_study(f"{path}:other")


def test_bad_names() -> None:
    with pytest.raises(ValueError, match=r"Unknown recipe 'papper'\. Did you mean paper"):
        find_study("papper")
    with pytest.raises(ValueError, match=r"There is no file nowhere\.py"):
        find_study("nowhere.py:f")
