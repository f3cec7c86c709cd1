from __future__ import annotations

from typing import Any

import pytest

from assay.bench.shapes import Shape, grid

USUAL: dict[str, Any] = {
    "lengths": (512, 2048),
    "dims": (128,),
    "tokens": 16384,
    "hidden": 2048,
    "kv_heads": None,
    "causal": True,
}


def shape(**changes: Any) -> Shape:
    usual: dict[str, Any] = {"batch": 2, "heads": 3, "kv_heads": 3, "queries": 5, "keys": 5, "dim": 7, "causal": False}
    return Shape(**(usual | changes))


def test_flops_are_two_products_and_five_more_in_backward() -> None:
    by_hand = 2 * 3 * (2 * 5 * 5 * 7 + 2 * 5 * 5 * 7)  # batch, heads, Q·Kᵀ and P·V, an addition for each product
    assert shape().flops("forward") == by_hand
    assert shape(causal=True).flops("forward") == by_hand / 2
    assert shape().flops("forward+backward") == by_hand * (2 + 5) / 2
    assert shape(queries=1).flops("forward") == by_hand / 5
    assert shape(kv_heads=1).flops("forward") == by_hand


def test_batch_and_heads_follow_from_tokens_and_width() -> None:
    first, second, few = grid(**USUAL)
    assert (first.batch, first.heads, first.kv_heads, first.queries, first.keys) == (32, 16, 16, 512, 512)
    assert (second.batch, second.tokens) == (8, 16384)
    assert (few.queries, few.keys, few.causal, few.few_queries) == (1, 512, False, True)
    assert few.name == "1 query against 512 keys"


def test_a_sequence_longer_than_the_tokens_is_one_sequence() -> None:
    assert [s.batch for s in grid(**USUAL | {"tokens": 1000, "lengths": (300, 4096)})] == [3, 1, 3]


def test_every_dim_has_every_length_once() -> None:
    shapes = grid(**USUAL | {"dims": (64, 128, 64), "lengths": (256, 256, 64), "kv_heads": 8})
    assert [(s.dim, s.queries, s.keys, s.heads) for s in shapes] == [
        (64, 256, 256, 32),
        (64, 64, 64, 32),
        (64, 1, 64, 32),
        (128, 256, 256, 16),
        (128, 64, 64, 16),
        (128, 1, 64, 16),
    ]
    assert {s.kv_heads for s in shapes} == {8}


def test_one_key_has_no_fewer_queries() -> None:
    assert [s.name for s in grid(**USUAL | {"lengths": (1,)})] == ["N 1"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden": 2000}, "multiple of --dim .* got 2000 and 128. Try --hidden 1920"),
        ({"hidden": 64}, "Try --hidden 128"),
        ({"kv_heads": 3}, "must divide the heads .* Choose of 1, 2, 4, 8, 16"),
        ({"kv_heads": 32}, "got 32"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grid(**USUAL | changes)
