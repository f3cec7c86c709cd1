"""Trainings and studies as data: what may be a pair, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from torch import nn

from assay.training.precision import POLICIES
from assay.training.training import Pair, PairStudy, Training, changes


def study(arm: Training, reference: Training, several: bool = False, **more: Any) -> PairStudy:
    pair = Pair(name="mine", arm="arm", reference="reference", several=several)
    return PairStudy(asked="", trainings={"arm": arm, "reference": reference}, pairs=(pair,), **more)


def nothing(model: nn.Module) -> None:
    pass


@pytest.mark.parametrize(
    "change",
    [
        {"attention": "flash"},
        {"precision": "fp32"},
        {"precision": POLICIES["bf16"].replace(norms="matmul")},
        {"init_seed": 1},
        {"order_seed": 1},
        {"noise_seed": 1},
        {"optimizer": "muon"},
        {"change": nothing},
        {"data": "synthetic"},
    ],
    ids=str,
)
def test_a_pair_differs_in_one_thing(change: dict[str, Any]) -> None:
    base = Training()
    made = study(replace(base, **change), base)
    ((name, value),) = change.items()
    assert changes(made.trainings["arm"], base) == {name: (getattr(base, name), value)}


def test_a_pair_that_differs_in_nothing_or_in_too_much() -> None:
    base = Training()
    with pytest.raises(ValueError, match=r"'arm' and 'reference' do in nothing.*several=True"):
        study(base, base)
    other = replace(base, attention="flash", init_seed=1)
    with pytest.raises(ValueError, match="more than one thing: attention, init_seed"):
        study(other, base)
    assert study(base, base, several=True).seeds == (0, 1, 2)
    assert changes(other, study(other, base, several=True).trainings["reference"]).keys() == {"attention", "init_seed"}
    same = replace(base, precision=POLICIES["bf16"].replace(name="mine"))
    assert same.policy == base.policy  # the name of a policy is not a difference of it


@pytest.mark.parametrize("change", [{"size": "5m"}, {"task": "gpt"}, {"image": 64}, {"context": 64}], ids=str)
@pytest.mark.parametrize("several", [False, True])
def test_what_cannot_be_compared_is_refused(change: dict[str, Any], several: bool) -> None:
    with pytest.raises(ValueError, match=f"must have the same shapes.* differ in {next(iter(change))}"):
        study(replace(Training(), **change), Training(), several)


def test_studies_that_are_none() -> None:
    base = Training()
    other = replace(base, init_seed=1)
    for more in ({"seeds": ()}, {"every": 0}):
        with pytest.raises(ValueError, match="needs pairs, seeds and a distance"):
            study(other, base, **more)
    with pytest.raises(ValueError, match=r"needs pairs.*0 pairs"):
        PairStudy(asked="", trainings={"base": base}, pairs=())
    pair = Pair(name="p", arm="other", reference="bse")
    with pytest.raises(ValueError, match="The pair 'p' names 'bse'; there are: base, other"):
        PairStudy(asked="", trainings={"base": base, "other": other}, pairs=(pair,))
    with pytest.raises(ValueError, match="as many steps each"):
        study(replace(other, steps=3), base, several=True)
    with pytest.raises(ValueError, match="'arm' skips like 'nobody', which must be a training of the study"):
        study(replace(base, skips_like="nobody"), base)
    with pytest.raises(ValueError, match="that skips by itself"):
        study(replace(base, skips_like="arm"), base)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task": "text_to_imge"}, r"Unknown task 'text_to_imge'\. Did you mean text_to_image"),
        ({"optimizer": "adam"}, r"Unknown optimizer 'adam'\. Did you mean adamw"),
        ({"precision": "bf61"}, r"Unknown precision 'bf61'\. Did you mean .*bf16"),
        ({"attention": "standrd"}, r"Unknown attention 'standrd'\. Did you mean standard"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"image": -1}, "image must be at least 1"),
    ],
)
def test_bad_trainings(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Training(**change)


def test_other_seeds_keep_what_is_shared() -> None:
    base, other = Training(), Training(init_seed=1)
    moved = [training.reseeded(2) for training in (base, other)]
    assert [(t.init_seed, t.order_seed, t.noise_seed) for t in moved] == [(2000, 2000, 2000), (2001, 2000, 2000)]
    assert changes(moved[1], moved[0]) == {"init_seed": (2000, 2001)}
    assert base.reseeded(0) == base
    with pytest.raises(FrozenInstanceError):
        base.steps = 3  # type: ignore[misc]
