"""The golden value's kernels in Triton's interpreter, on the CPU, against golden attention and plain torch in FP64.

Run as `python -m tests.watching.interpreted_golden` with TRITON_INTERPRET=1, which Triton reads when it is imported:
hence a process of its own.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.cases.attention.golden import golden_attention, golden_gradients
from assay.watching.call import AttentionCall
from assay.watching.plain import plain
from assay.watching.scores import HIDDEN, Scores
from assay.watching.triton_golden import Tile, Tiles, golden

TILES = Tiles(Tile(32, 8, 4), Tile(16, 8, 4), Tile(32, 8, 4))
PLENTY = 1 << 30


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call_of(queries: int, keys: int, dtype: torch.dtype, many: int = 1, **how: Any) -> AttentionCall:
    """`many` sequences, and twice as many heads, in pairs that share k and v; q lies otherwise in memory."""
    q = draw(many, queries, 2 * many, 8).to(dtype).transpose(1, 2)
    k, v = draw(many, many, keys, 8, seed=1).to(dtype), draw(many, many, keys, 12, seed=2).to(dtype)
    return AttentionCall(q=q, k=k, v=v, scale=0.3, **how)


def near(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-12 of the largest; the same where it is not finite."""
    largest = theirs.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * largest, equal_nan=True)


def check(call: AttentionCall, held: int = PLENTY, tiles: Tiles = TILES) -> tuple[Tensor, ...]:
    """Against plain torch, with what the scores are like."""
    grad = draw(*call.q.shape[:3], call.v.shape[3], seed=5).to(call.dtype)
    scores = Scores(call.dtype, call.sinks is not None)
    expected = plain(call.in_double(), grad, scores)
    found, rows = golden(call, grad, HIDDEN, tiles, held)
    near(rows, torch.cat(scores._found, -1))
    for ours, theirs in zip(found, expected, strict=True):
        near(ours, theirs)
    return found


def check_against_golden(dtype: torch.dtype, many: int) -> None:
    """Of `assay.golden_attention`, which mpmath has checked and which shares nothing with this."""
    bias = draw(many, 2 * many, 40, 45, seed=3)
    masks: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"left": 9, "right": 2}, {"window": (9, 2)}),
        ({"bias": bias, "right": 0}, {"bias": bias, "causal": True}),
        ({"bias": bias > 0}, {"bias": bias > 0}),
        ({"slopes": bias[:, :, 0, 0].abs()}, {"alibi_slopes": bias[:, :, 0, 0].abs()}),
    ]
    for mine, theirs in masks:
        call = call_of(40, 45, dtype, many, **mine)
        tensors: dict[str, Any] = {"q": call.q, "k": call.k, "v": call.v, "scale": 0.3}
        out, *gradients = check(call)
        near(out, golden_attention(**tensors, **theirs))
        assert torch.equal(out, golden(call, None, HIDDEN, TILES)[0][0])  # without gradients
        grad = draw(*out.shape, seed=5).to(dtype)
        for ours, exactly in zip(gradients, golden_gradients(grad=grad, **tensors, **theirs), strict=True):
            near(ours, exactly)


def check_windows() -> None:
    """Longer and shorter than the keys, windows that leave rows without any."""
    for window in ({"right": 0}, {"left": 2, "right": 3}, {"right": -20}, {"left": -3}):
        for queries, keys in ((9, 50), (50, 9)):
            check(call_of(queries, keys, torch.float32, **window))


def check_some_at_a_time() -> None:
    """Three groups of heads where there is room for two, and rows where there is not even room for one."""
    q, k, v = draw(1, 3, 40, 8).half(), draw(1, 3, 40, 8, seed=1).half(), draw(1, 3, 40, 12, seed=2).half()
    row = 2 * 8 * 64
    for held in (row * 48 * 2, row * 32, 1):
        check(AttentionCall(q=q, k=k, v=v, scale=0.3, left=12, right=3), held)


def check_the_rest() -> None:
    """Softcap, sinks that are higher than any score, a mask by a large number, and one for all rows."""
    sinks, some = torch.tensor([0.5, 900.0]), draw(1, 1, 1, 40, seed=4) > 0
    hows: list[dict[str, Any]] = [
        {"softcap": 0.5, "right": 0}, {"sinks": sinks}, {"sinks": sinks, "left": 3, "right": -3},
        {"bias": torch.full((1, 1, 40, 40), -3e38).triu(1)}, {"bias": torch.zeros(1, 2, 40, 1) - 3e38},
        {"bias": some}, {"bias": some.expand(1, 2, 40, 40).contiguous().transpose(2, 3)},
        {"slopes": draw(2, seed=6).abs(), "softcap": 2.0, "sinks": sinks, "bias": draw(1, 2, 40, 40).half()},
    ]  # fmt: skip
    for how in hows:
        check(call_of(40, 40, torch.float32, **how))
    check(call_of(33, 50, torch.float16, right=0), tiles=Tiles(Tile(16, 16, 4), Tile(32, 16, 4), Tile(16, 32, 4)))


def check_ties() -> None:
    """Of keys in two tiles: the same, the same but for FP32's last bits, the same in FP16's few bits."""
    for dtype, factor, tied in ((torch.float32, 1, True), (torch.float32, 1 + 2**-20, False), (torch.float16, 1, True)):
        q, k = torch.ones(1, 1, 20, 8, dtype=dtype), draw(1, 1, 40, 8).abs().to(dtype)
        k[:, :, 3], k[:, :, 30] = 5.0, 5.0 * factor
        bias = 1e-5 * draw(1, 1, 20, 40) if dtype == torch.float16 else None
        _, rows = golden(AttentionCall(q=q, k=k, v=k, scale=1.0, bias=bias), None, HIDDEN, TILES)
        assert (rows[3] == tied).all()


def check_not_finite() -> None:
    """NaN and infinity spoil what they spoil in plain torch."""
    for bad in (torch.nan, torch.inf):
        call = call_of(40, 40, torch.float32)
        call.q[0, 1, 7, 2] = bad
        check(call)


def main() -> None:
    torch.use_deterministic_algorithms(True)  # what nobody has written is NaN
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of NaN
    check_against_golden(torch.float16, 2)
    check_against_golden(torch.float32, 1)
    check_windows()
    check_some_at_a_time()
    check_the_rest()
    check_ties()
    check_not_finite()
    print("all agree")


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
