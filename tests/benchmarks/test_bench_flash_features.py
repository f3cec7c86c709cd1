from __future__ import annotations

import pytest
import torch

from benchmarks.bench_flash import TOKENS
from benchmarks.bench_flash_features import UNEQUAL, Feature, pairs

CAUSAL = {"causal": True}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (2, 5), (30, 40), (40, 1)])
@pytest.mark.parametrize("length", [1, 7, 33])
def test_pairs_are_those_of_the_mask(length: int, window: tuple[int, int] | None, causal: bool) -> None:
    seen = torch.ones(length, length, dtype=torch.bool)
    if window is not None:
        seen = seen.triu(-window[0]).tril(window[1])
    if causal:
        seen = seen.tril()
    assert pairs(length, causal, window) == int(seen.sum())


def test_a_feature_is_held_against_as_many_pairs() -> None:
    assert sum(UNEQUAL) == TOKENS
    assert Feature(name="", how=CAUSAL | {"softcap": 3.0}, plain=CAUSAL).pairs_over_plain == 1
    packed = Feature(name="", how=CAUSAL, plain=CAUSAL, packed=UNEQUAL).pairs_over_plain
    assert packed == sum(n * (n + 1) for n in UNEQUAL) / (4 * 4096 * 4097)
    window = Feature(name="", how={"window": (1023, 0)}, plain=CAUSAL, length=16384, plain_length=2048)
    assert window.pairs_over_plain == (16384 * 1024 - 1024 * 1023 // 2) / (8 * 2048 * 2049 // 2)
