"""Recipes of pairs: the arms of Figure 8 and their controls, and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.models.gpt import gpt_sizes
from assay.models.text_to_image import text_to_image_sizes
from assay.recipes.files import find_recipe
from assay.recipes.pairs import BASE, PAIR_RECIPES
from assay.recipes.study import Study, find_study
from assay.sweeps.grid import default_sweep
from assay.training.training import PairStudy, changes

FIGURE_8 = {
    "null": (),
    "flash": ("attention",),
    "flash in FP16": ("attention",),
    "other initialisation": ("init_seed",),
    "BF16 ↔ FP32": ("precision",),
    "FP16 ↔ FP32": ("precision",),
    "skipped steps alone": ("skips_like",),
    "FP16 ↔ FP32, same steps": ("precision", "skips_like"),
}
MORE = {
    "FP8 ↔ BF16": ("precision",),
    "flash, small blocks": ("attention",),
    "flash, every step in bf16": ("attention",),
    "other order": ("order_seed",),
}


@pytest.mark.parametrize("name", PAIR_RECIPES)
def test_the_known_ones(name: str) -> None:
    study = find_recipe(name, PAIR_RECIPES, PairStudy)
    found = {p.name: tuple(changes(study.trainings[p.arm], study.trainings[p.reference])) for p in study.pairs}
    asked = {"full": ("FP8 ↔ BF16", "flash, every step in bf16"), "paper": tuple(MORE)}.get(name, ())
    more = {pair: MORE[pair] for pair in asked}
    assert found == ({"flash": ("attention",)} if name in ("speed", "long") else FIGURE_8 | more)
    assert len(study.seeds) >= (1 if name == "long" else 3)
    base = study.trainings[BASE]
    assert base.size in (text_to_image_sizes if base.task == "text_to_image" else gpt_sizes)
    assert {training.size for training in study.trainings.values()} == {base.size}
    assert base.steps >= 2 * study.every  # there is a slope to speak of


def test_the_sizes_the_issue_asks_for() -> None:
    base = PAIR_RECIPES["full"]().trainings[BASE]
    config = text_to_image_sizes[base.size]
    assert base.size == "100m"
    assert (base.image // config.patch) ** 2 >= 256
    assert base.data == "openmoji"


OWN = """
from dataclasses import replace
from assay.training.training import Pair, PairStudy, Training

def mine():
    base = Training(size="300k", data="synthetic", steps=2)
    pair = Pair(name="sdpa", arm="sdpa", reference="base")
    return PairStudy(asked="Mine?", trainings={"base": base, "sdpa": replace(base, attention="sdpa")}, pairs=(pair,))
"""


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    assert find_recipe(str(path), PAIR_RECIPES, PairStudy).asked == "Mine?"
    assert find_recipe(f"{path}:mine", PAIR_RECIPES, PairStudy) == find_recipe(str(path), PAIR_RECIPES, PairStudy)
    with pytest.raises(ValueError, match=r"mine\.py:mine must return a Study, got PairStudy"):
        find_study(f"{path}:mine")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def mine(:", "could not be run: SyntaxError"),
        ("import nowhere_to_be_found", "could not be run: ModuleNotFoundError"),
        ("def mine():\n    return 3", "must return a PairStudy, got int"),
        ("def mine():\n    return 1 / 0", "failed: ZeroDivisionError: division by zero"),
        (OWN.replace('attention="sdpa"', 'attention="spda"'), "failed: ValueError: Unknown attention 'spda'. Did you"),
        (OWN.replace('attention="sdpa"', 'attention="standard"'), "must differ in exactly one thing"),
        ("from math import sqrt", r"has 0 functions; name one of: \(it has none\)"),
    ],
)
def test_files_that_are_no_recipes(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        find_recipe(str(path), PAIR_RECIPES, PairStudy)


def test_bad_names() -> None:
    with pytest.raises(
        ValueError,
        match=r"Unknown recipe 'quikc'\. Did you mean quick.*There are: quick, paper, full, speed, long, gpt",
    ):
        find_recipe("quikc", PAIR_RECIPES, PairStudy)
    with pytest.raises(ValueError, match=r"There is no file nowhere\.py"):
        find_recipe("nowhere.py:mine", PAIR_RECIPES, PairStudy)


def test_a_study_may_have_pairs() -> None:
    pairs = PAIR_RECIPES["quick"]()
    assert Study(asked="", sweeps=(default_sweep("inputs"),), pairs=pairs).pairs is pairs
    assert find_study("quick").sweeps
