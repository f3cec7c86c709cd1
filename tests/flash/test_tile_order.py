"""Which tiles of the Hopper kernels go together, and when the last of them ends."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from assay.flash import gpu, hopper, hopper_forward
from assay.flash.call import Call

PROCESSORS = 132
ENDS = 2
"""What a tile takes beside its blocks of keys, in blocks: about what was measured."""


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "processors", lambda index: PROCESSORS)


def drawn(length: int, dim: int, **how: Any) -> Call:
    """16,384 tokens, hidden 2048."""
    q = torch.empty(16384 // length, 2048 // dim, length, dim, dtype=torch.bfloat16, device="meta")
    return Call(q=q, k=q, v=q, scale=1.0, **how)


def tiles(call: Call, together: int, shape: Any) -> Iterator[int]:
    """Blocks of keys of tile after tile, as `hopper_tiles.work_of` orders them."""
    rows, heads = 64 * shape.consumers, call.q.shape[0] * call.q.shape[1]
    for first_head in range(0, heads, together):
        for first in reversed(range(0, call.q.shape[2], rows)):
            begin = 0 if call.left is None else max(first - call.left, 0) // shape.columns
            end = -(-min(first + rows, call.k.shape[2]) // shape.columns)
            yield from [end - begin] * min(together, heads - first_head)


def over_ideal(call: Call, together: int | None = None) -> float:
    """When the last tile ends, if whoever is free takes the next, over the mean of the processors."""
    shape = hopper_forward.shape_of(call)
    free = [0] * PROCESSORS
    for blocks in tiles(call, together or hopper_forward.together(call, shape), shape):
        heapq.heapreplace(free, free[0] + blocks + ENDS)
    return max(free) * PROCESSORS / sum(free)


@pytest.mark.parametrize("left", [None, 1023, 4095])
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_later_than_by_four_heads(dim: int, length: int, left: int | None) -> None:
    call = drawn(length, dim, left=left, right=0)
    assert over_ideal(call) <= 1.002 * over_ideal(call, 4)


@pytest.mark.parametrize(("dim", "by_four", "now"), [(128, 1.04, 1.02), (256, 1.09, 1.04)])
def test_causal_calls_end_together(dim: int, by_four: float, now: float) -> None:
    call = drawn(2048, dim, right=0)
    assert over_ideal(call, 4) > by_four
    assert over_ideal(call) < now


@pytest.mark.parametrize(("dim", "least"), [(128, 1.005), (256, 1.05)])
def test_windows_have_equal_tiles(dim: int, least: float) -> None:
    """So that their last round is waited for, whatever the order."""
    call = drawn(16384, dim, left=1023, right=0)
    assert min(over_ideal(call, together) for together in (None, 1, 4, 8, 16)) > least


def test_one_head_of_k_for_many() -> None:
    """Hundreds of heads share what is cached: a number all the same."""
    q, k = (torch.empty(1, heads, 64, 64, dtype=torch.bfloat16, device="meta") for heads in (1024, 1))
    call = Call(q=q, k=k, v=k, scale=1.0, left=0, right=0)
    assert hopper_forward.together(call, hopper_forward.shape_of(call)) == 256


@pytest.mark.parametrize(
    ("kv_heads", "how", "expected"),
    [(4, {"right": 0}, 9), (4, {}, 1), (64, {"right": 0}, 1)],
    ids=["few", "equal", "many"],
)
def test_few_long_tiles_go_together(kv_heads: int, how: dict[str, Any], expected: int) -> None:
    """Heads of 32 tiles on 132 processors: nine have two for each."""
    q, k = (torch.empty(1, heads, 4096, 64, dtype=torch.bfloat16) for heads in (64, kv_heads))
    assert hopper.together(Call(q=q, k=k, v=k, scale=1.0, **how)) == expected


@pytest.mark.parametrize(
    ("keys", "dim", "how", "expected"),
    [
        (2048, 128, {}, 4),
        (2048, 128, {"right": 0}, 16),
        (2048, 256, {"right": 0}, 8),
        (8192, 128, {"right": 0}, 4),
        (8192, 128, {"left": 1023, "right": 0}, 32),
        (2048, 64, {"right": 0}, 4),
    ],
    ids=["equal", "16 tiles of a head", "a cache of 16 MB", "long", "8 short tiles of a head", "three consumers"],
)
def test_heads_go_together_so_that_short_tiles_are_last(
    keys: int, dim: int, how: dict[str, Any], expected: int
) -> None:
    """On 132 processors, with two tiles for each, as a power of 2."""
    q = torch.empty(1, 16, keys, dim, dtype=torch.bfloat16)
    call = Call(q=q, k=q, v=q, scale=1.0, **how)
    assert hopper_forward.together(call, hopper_forward.shape_of(call)) == expected
