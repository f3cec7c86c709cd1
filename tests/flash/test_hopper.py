"""The Hopper forward: what no row may notice (how many consumers there are), and who counts its tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.flash import hopper, launch
from assay.flash.call import Call
from assay.flash.kernels.hopper_forward import Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


def call(length: int = 1000, dim: int = 64, seed: int = 0, **how: Any) -> Call:
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(1, 8, length, dim, device="cuda", generator=generator).bfloat16() for _ in range(3))
    return Call(q=q, k=k, v=v, scale=dim**-0.5, **how)


@pytest.mark.parametrize("how", [{}, {"right": 0}, {"left": 100, "right": 20}], ids=str)
@pytest.mark.parametrize("length", [64, 130, 1000])
def test_the_number_of_consumers_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, length: int, how: dict[str, int]
) -> None:
    this, chosen = call(length, **how), hopper.shape_of

    def shape(consumers: int) -> Shape:
        three = consumers == 3
        return replace(
            chosen(this), consumers=consumers, turns=three, q_in_registers=not three, q_stages=2 if three else 1
        )

    results = []
    for consumers in (2, 3):
        monkeypatch.setattr(hopper, "shape_of", lambda _, consumers=consumers: shape(consumers))
        results.append(launch.forward(this))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_streams_and_graphs_at_the_same_time() -> None:
    """Each counts its own tiles: a tile that another kernel counted would be left out."""
    calls = [call(seed=seed, dim=128, right=0) for seed in range(4)]
    expected = [launch.forward(each)[0] for each in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    graphs = []
    for each in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, launch.forward(each)[0]))
    for _ in range(20):
        for _, out in graphs:
            out.zero_()
        torch.cuda.synchronize()
        found = []
        for stream, each, (graph, _) in zip(streams, calls, graphs, strict=True):
            with torch.cuda.stream(stream):
                found.append(launch.forward(each)[0])
                graph.replay()
        torch.cuda.synchronize()
        for a, (_, b), c in zip(found, graphs, expected, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, c)


def test_a_kernel_leaves_its_counter_at_zero() -> None:
    lengths = torch.tensor([0, 100, 100, 1000], device="cuda", dtype=torch.int32)
    packed = replace(call(right=0), cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    for each in (call(), call(64, right=0), packed):
        launch.forward(each)
        counter = hopper._counter(each.q.device)
        assert int(counter[0]) == 0


def test_captured_calls_past_the_store_zero_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    this = call(right=0)
    expected = launch.forward(this)[0]
    zeros, _ = hopper._COUNTERS[this.q.device.index]
    monkeypatch.setitem(hopper._COUNTERS, this.q.device.index, (zeros, iter(())))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.forward(this)[0]
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
