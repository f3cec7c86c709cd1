"""Calls that repeat: what is launched again is what the launch code would launch, by the kernel Triton would take."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from assay.flash import launch, replay
from assay.flash.call import Call
from assay.flash.layout import aligned
from assay.flash.numerics import Numerics
from tests.flash.emulated_calls import random_call
from tests.flash.fake_launches import ZERO, Asked, Compiled, held, other

DIMS = ((64, 64), (128, 128), (256, 256), (64, 128), (40, 24))


def renewed(call: Call) -> Call:
    new = {name: other(getattr(call, name)) for name in ("q", "k", "v", "slopes", "sinks", "bias", "cu_seqlens_q")}
    alike = call.cu_seqlens_k is call.cu_seqlens_q
    return replace(call, **new, cu_seqlens_k=new["cu_seqlens_q"] if alike else other(call.cu_seqlens_k))


def launched(asked: Asked, call: Call, dout: torch.Tensor, dlse: torch.Tensor | None) -> list[Any]:
    """By forward and backward; the tensors that are given come first."""
    asked.launches.clear()
    out = torch.zeros(*call.q.shape[:3], call.v.shape[3], dtype=call.q.dtype)
    lse = torch.zeros(call.q.shape[:3])
    lengths = call.cu_seqlens_q, call.cu_seqlens_k
    given = (call.q, call.k, call.v, call.slopes, call.sinks, call.bias, *lengths, out, lse, dout, dlse, ZERO)
    asked.tensors = [x for x in given if x is not None]
    held(launch.forward(call))
    held(launch.backward(replace(call), out, lse, dout, dlse, call.bias is not None))  # as the operators make it
    held.clear()
    return list(asked.launches)


def drawn(rng: np.random.Generator) -> tuple[Call, torch.Tensor, torch.Tensor | None]:
    call = random_call(rng, Call, DIMS[rng.integers(len(DIMS))], deterministic=bool(rng.random() < 0.3))
    call = replace(call, batch_invariant=bool(rng.random() < 0.2), scale=float(rng.choice([call.scale, 1.0, 16.0])))
    dout = torch.empty(*call.q.shape[:3], call.v.shape[3], dtype=call.q.dtype)
    if rng.random() < 0.3:
        dout = dout[:, :, :1].expand(dout.shape) if rng.random() < 0.5 else dout.mT.contiguous().mT
    if rng.random() < 0.2 and not call.packed:
        bias = torch.empty(1, 1, call.q.shape[2], call.k.shape[2], dtype=call.q.dtype)
        call = replace(call, bias=bias, slopes=None)
    return call, dout, torch.empty(call.q.shape[:3]) if rng.random() < 0.3 else None


def beside(call: Call, dout: torch.Tensor, dlse: torch.Tensor | None) -> Iterator[Any]:
    """The call, and those that differ from it in one tensor's strides, in the dtype, or in the batch alone."""
    yield call, dout, dlse
    names = ("q", "k", "v")
    for name in names:
        other_strides: Any = {name: turned(getattr(call, name))}
        yield replace(call, **other_strides), dout, dlse
    yield call, turned(dout), dlse
    if dlse is not None:
        yield call, dout, dlse.mT.contiguous().mT
    half = torch.float16 if call.q.dtype == torch.bfloat16 else torch.bfloat16
    other_dtype: Any = {name: getattr(call, name).to(half) for name in names}
    yield replace(call, **other_dtype), dout.to(half), dlse
    slopes = None if call.slopes is None or call.packed else call.slopes[:1]
    first: Any = {name: getattr(call, name)[:1] for name in names}
    yield replace(call, **first, slopes=slopes), dout[:1], None if dlse is None else dlse[:1]
    if call.sinks is not None:
        yield replace(call, sinks=call.sinks.double()), dout, dlse


def turned(x: torch.Tensor) -> torch.Tensor:
    """(B, N, H, D) in memory, with room between the heads."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim + 8)[..., :dim].transpose(1, 2)


@pytest.mark.parametrize("encoded", [True, False], ids=["Hopper", "before"])
def test_what_is_launched_again(asked: Asked, monkeypatch: pytest.MonkeyPatch, encoded: bool) -> None:
    """Call after call, one memory for all: the key tells apart what is launched in another way."""
    asked.encoded = encoded
    rng = np.random.default_rng(0)
    again = 0
    few = [each for _ in range(25) for each in beside(*drawn(rng))]
    for turn in range(3):
        for call, dout, dlse in few:
            call, dout, dlse = renewed(call), other(dout), other(dlse)
            asked.again = 0
            found = launched(asked, call, dout, dlse)
            again += asked.again > 0
            if turn == 2:
                assert asked.again in (0, len(found)) or call.scale < 0 or not same_place(dout)
            with monkeypatch.context() as patch:
                patch.setattr(replay, "can", lambda x: False)
                assert found == launched(asked, replace(call), dout, dlse)  # a call counts its tiles once
    assert again > 60


def same_place(dout: torch.Tensor) -> bool:
    """Whether the kernels take it as it is."""
    return aligned(dout) is dout


def call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> Call:
    return Call(q=q, k=k, v=v, scale=0.3, **how)


def three(dim: int = 64) -> list[torch.Tensor]:
    return [torch.empty(1, 2, 300, dim, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.25}, {"left": 100}, {"right": 0}, {"right": 16}, {"softcap": 5.0}, {"deterministic": True},
        {"sinks": torch.zeros(2)}, {"slopes": torch.zeros(1, 2), "right": 0}, {"batch_invariant": True}, {"tf32": True},
        {"numerics": Numerics(reverse_keys=True)}, {"dropout": 0.5, "seed": torch.tensor(5)},
    ],
    ids=lambda change: ", ".join(change),
)  # fmt: skip
def test_another_kind_is_not_taken_for_it(asked: Asked, change: dict[str, Any]) -> None:
    first: Any = {"dropout": 0.25, "seed": torch.tensor(5)} if "dropout" in change else {}
    for _ in range(3):
        launch.forward(call_of(*three(), **first))
    assert asked.again == 1
    for _ in range(2):
        launch.forward(replace(call_of(*three()), **change))
    assert asked.again == 1


def test_switches_are_part_of_the_kind(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        launch.forward(call_of(*three()))
    for target, name, value in (
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "x"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            launch.forward(call_of(*three()))
    assert asked.again == 0


def test_launches_that_are_watched_are_not_taken(asked: Asked) -> None:
    """Triton tells who asked for it of every launch; what is launched again would not."""

    def hook(*_: Any) -> None: ...

    for _ in range(3):
        launch.forward(call_of(*three()))
    assert asked.again == 1
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch.forward(call_of(*three()))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert asked.again == 1
    launch.forward(call_of(*three()))
    assert asked.again == 2


def test_in_a_capture_nothing_is_recorded(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counter is its own. What is kept already is taken."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(3):
            launch.forward(call_of(*three()))
    assert asked.again == 0
    for _ in range(2):
        launch.forward(call_of(*three()))
    assert asked.again == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch.forward(call_of(*three()))
    assert asked.again == 2


def test_memory_is_held_until_all_is_launched(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free would be given to the next who asks: rooms, and a counter that is made for this call."""
    made: list[weakref.ref[torch.Tensor]] = []

    def new(*of: Any) -> torch.Tensor:
        x = torch.empty(of[0], dtype=of[1]) if len(of) == 3 else torch.zeros(4, dtype=torch.int32)
        made.append(weakref.ref(x))
        return x

    def alive(self: Compiled, *taken: Any) -> None:
        assert [x() is not None for x in made] == [True] * len(made)
        asked.again += 1

    q, k, v = three()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    backward = call_of(q, k, v), out, lse, torch.empty_like(q), None, False
    monkeypatch.setattr(Compiled, "launch", alive)
    for _ in range(2):
        launch.backward(*backward)
    monkeypatch.setattr(replay, "_made", new)
    monkeypatch.setattr(replay, "counter", new)
    launch.backward(*backward)
    assert asked.again == 3
    assert len(made) == 2  # the counter, and dQ's sums


def test_one_tensor_twice(asked: Asked) -> None:
    """Is not kept: which of the two would an argument be?"""
    q, k, v = three()
    for x in ((q, q, q), (q, k, k), (q, q, q)):
        launch.forward(call_of(*x))
    asked.launches.clear()
    asked.tensors = [q, k, v]
    launch.forward(call_of(q, k, v))
    assert asked.again == 0
    launch.forward(call_of(q, q, q))  # now it is known which is which
    assert asked.again == 1
    bases = [argument[1][0] for argument in asked.launches[-1][2][:3]]
    assert bases == [0, 0, 0]


def test_addresses_that_are_no_multiple_of_16(asked: Asked) -> None:
    q, k, v = three()
    aside = torch.empty(q.numel() + 8, dtype=q.dtype)[4:-4].view(q.shape)
    assert aside.data_ptr() % 16 == 8
    for _ in range(2):
        launch.forward(call_of(q, k, v))
    for _ in range(3):
        launch.forward(call_of(aside, k, v))
    assert asked.again == 0


def test_a_tensor_from_elsewhere_is_not_kept(asked: Asked) -> None:
    q, k, v = three()
    for _ in range(4):
        launch.forward(replace(call_of(q, k, v), scale=-1.0))  # −q
        launch.forward(replace(call_of(q, k, v), bias=torch.ones(1, 1, 300, 300, dtype=torch.bool)))  # seen as bytes
    assert asked.again == 0


def test_no_tensor_is_held(asked: Asked) -> None:
    q, k, v = three()
    call = call_of(q, k, v, slopes=torch.zeros(1, 2), right=0)
    for _ in range(2):
        out, lse = launch.forward(call)
        launch.backward(call, out, lse, torch.zeros_like(out), None, False)
    references = [weakref.ref(x) for x in (q, k, v, call.slopes, out, lse)]
    asked.tensors.clear()
    asked.launches.clear()
    del q, k, v, call, out, lse
    gc.collect()
    assert [reference() for reference in references] == [None] * 6
    assert len(replay._KNOWN) == 2


@pytest.mark.parametrize("alike", [True, False], ids=["one list of lengths", "two"])
@pytest.mark.parametrize("dim", [64, 256])
def test_packed_calls_are_launched_again(asked: Asked, dim: int, alike: bool) -> None:
    """Their tiles are counted every time, from the lengths that are there."""
    names: list[list[str]] = []
    for _ in range(3):
        cu = torch.tensor([0, 100, 300], dtype=torch.int32)
        call = call_of(*three(dim), cu_seqlens_q=cu, cu_seqlens_k=cu if alike else cu.clone())
        asked.again = 0
        names.append([name for name, *_ in launched(asked, call, torch.empty_like(call.q), None)])
    assert asked.again == len(names[2])
    assert names[0] == names[1] == names[2]
    assert names[2].count("count_places") >= 2  # in the forward pass, and in the backward pass
