"""Decoding, step after step: what is launched again is what the launch code would launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from assay.flash import decode_launch, replay
from assay.flash.decode import CacheCall
from tests.flash.fake_launches import Asked, held, other


def cache_call(paged: bool, **how: Any) -> CacheCall:
    """Of two sequences, one query each, with 4 heads to one of K and V."""
    k, v = (torch.empty(*((10, 1, 128) if paged else (2, 1, 640)), 64, dtype=torch.bfloat16) for _ in "kv")
    table = torch.empty(2, 5, dtype=torch.int32) if paged else None
    other: Any = {"slopes": None, "sinks": None, "left": None, "right": 0, "softcap": None, "splits": None, **how}
    return CacheCall(
        q=torch.empty(2, 4, 1, 64, dtype=torch.bfloat16), k=k, v=v, lengths=torch.empty(2, dtype=torch.int32),
        table=table, longest=640, scale=0.3, batch_invariant=False, **other,
    )  # fmt: skip


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("splits", [1, 3])
def test_decoding(asked: Asked, monkeypatch: pytest.MonkeyPatch, paged: bool, splits: int) -> None:
    """Step after step, each with memory of its own: the kernel, and with splits the one that merges them."""
    kinds: list[Any] = [{}, {"left": 100}, {"softcap": 5.0}, {"sinks": torch.zeros(4)}, {"slopes": torch.zeros(2, 4)}]
    for turn in range(3):
        for how in kinds:
            own = {name: other(x) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
            call = cache_call(paged, splits=splits, **own)
            asked.again = 0
            found = decoded(asked, call)
            assert len(found) == (1 if splits == 1 else 2)
            assert asked.again == (len(found) if turn == 2 else 0)
            with monkeypatch.context() as patch:
                patch.setattr(replay, "can", lambda x: False)
                assert decoded(asked, call) == found


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.25}, {"left": 100}, {"right": 5}, {"softcap": 5.0}, {"splits": 2}, {"longest": 500},
        {"splits": None, "batch_invariant": True}, {"lengths": None}, {"sinks": torch.zeros(4)},
    ],
    ids=lambda change: ", ".join(change),
)  # fmt: skip
def test_another_kind_of_decoding(asked: Asked, change: dict[str, Any]) -> None:
    for _ in range(3):
        decode_launch.launch(cache_call(False, splits=1))
    assert asked.again == 1
    for _ in range(2):
        decode_launch.launch(replace(cache_call(False, splits=1), **change))
    assert asked.again == 1


def test_a_scale_of_0_in_decoding(asked: Asked) -> None:
    """Is one key with −0, whose scores have another sign."""
    for scale in (0.0, 0.0, 0.0, -0.0):
        decode_launch.launch(replace(cache_call(False, splits=1), scale=scale))
    assert asked.again == 0


def decoded(asked: Asked, call: CacheCall) -> list[Any]:
    """What it launches; the tensors that are given come first."""
    asked.launches.clear()
    tensors = (call.q, call.k, call.v, call.lengths, call.table, call.slopes, call.sinks)
    asked.tensors = [x for x in tensors if x is not None]
    held(decode_launch.launch(call))
    held.clear()
    return list(asked.launches)
