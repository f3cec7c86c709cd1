"""The Hopper forward of two or three consumers: every feature, what no row may notice, and who counts its tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from assay import deviation
from assay.flash import counters, launch, replay
from assay.flash.call import Call
from assay.flash.layout import empty_output
from tests.flash.cases import Case, Drawn, largest, theirs

hopper = pytest.importorskip("assay.flash.hopper")
hopper_forward = pytest.importorskip("assay.flash.hopper_forward")
places = pytest.importorskip("assay.flash.places").places

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def on_hopper(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


PACKED = ((200, 200), (0, 7), (77, 140), (1, 300), (130, 130))
FEATURES = {
    "full": Case(queries=512, keys=512),
    "ragged": Case(queries=300, keys=515),
    "causal": Case(queries=513, keys=513, causal=True),
    "causal, more queries": Case(queries=400, keys=130, causal=True),
    "long": Case(queries=1500, keys=1500, causal=True, heads=(8, 2)),
    "long, alibi": Case(queries=1300, keys=1300, causal=True, heads=(8, 2), alibi=True),
    "window": Case(queries=600, keys=600, window=(100, 0)),
    "window both": Case(queries=1400, keys=1500, window=(65, 40)),
    "left only": Case(queries=600, keys=600, window=(33, None)),
    "softcap": Case(queries=260, keys=260, causal=True, softcap=2.0),
    "alibi": Case(queries=260, keys=330, alibi=True),
    "alibi, long": Case(queries=1300, keys=1400, alibi=True, heads=(8, 2)),
    "alibi, window": Case(queries=1400, keys=1500, window=(565, 340), alibi=True, sinks=True),
    "alibi, causal": Case(queries=260, keys=330, alibi=True, causal=True, sinks=True),
    "sinks": Case(queries=260, keys=260, sinks=True),
    "packed": Case(packed=PACKED),
    "packed, causal": Case(packed=PACKED, causal=True),
    "packed, window": Case(packed=(*PACKED, (700, 700)), window=(100, 0)),
    "packed, left only": Case(packed=(*PACKED, (700, 700)), window=(100, None)),
    "packed, alibi": Case(packed=(*PACKED, (700, 700)), alibi=True),
    "packed, sinks": Case(packed=PACKED, sinks=True, softcap=3.0),
}


def call(length: int = 1000, dim: int = 64, seed: int = 0, device: str = "cuda", **how: Any) -> Call:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (torch.randn(1, 8, length, dim, device=device, generator=generator).to(torch.bfloat16) for _ in range(3))
    return Call(q=q, k=k, v=v, scale=dim**-0.5, **how)


@pytest.mark.parametrize(
    ("length", "dim", "how", "consumers"),
    [
        (512, 64, {}, 3),
        (1024, 64, {"right": 0}, 2),
        (1025, 64, {"right": 0}, 3),
        (1500, 64, {"left": 1023, "right": 0}, 2),
        (1500, 64, {"left": 1023, "right": 1}, 3),
        (1500, 64, {"left": 100}, 3),
        (512, 64, {"left": 100}, 2),
        (2048, 128, {}, 2),
        (2048, 256, {"right": 0}, 2),
        (2048, 64, {"slopes": torch.ones(1, 8)}, 3),
        (2048, 64, {"slopes": torch.ones(1, 8), "softcap": 1.0}, 2),
        (3072, 64, {"right": 0, "cu_seqlens_q": torch.tensor([0, 512, 1024, 3072])}, 2),
        (3075, 64, {"right": 0, "cu_seqlens_q": torch.tensor([0, 512, 1024, 3075])}, 3),
    ],
)
def test_how_many_consumers(length: int, dim: int, how: dict[str, Any], consumers: int) -> None:
    this = call(length, dim, device="cpu", **how)
    assert hopper_forward.shape_of(this).consumers == consumers


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_no_worse_than_the_portable_kernel(name: str, dim: int, dtype: torch.dtype) -> None:
    """RMSE at most 1.05 of its; the same rows without keys."""
    drawn = Drawn(replace(FEATURES[name], dims=(dim, dim)), dtype).to("cuda")
    this, truth = drawn.call(), theirs(drawn, torch.float64)
    assert hopper.can(this)
    out, lse = launch.forward(this)
    other, other_lse = empty_output(this.q, dim), torch.empty_like(lse)
    launch._forward(this, other, other_lse)
    assert deviation(out, truth["out"]).rmse <= 1.05 * deviation(other, truth["out"]).rmse
    assert (out.double() - truth["out"]).abs().max() <= 0.02 * max(1.0, largest(truth["out"]))
    there = truth["lse"].isfinite()
    assert torch.equal(lse[~there].double(), truth["lse"][~there])
    worst = (other_lse.double() - truth["lse"])[there].abs().max()
    assert (lse.double() - truth["lse"])[there].abs().max() <= 2 * worst + 2**-20 * largest(truth["lse"])


@on_hopper
@pytest.mark.parametrize("how", [{}, {"right": 0}, {"left": 100, "right": 20}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_sequences_have_the_bits_they_have_alone(dim: int, how: dict[str, Any]) -> None:
    lengths = torch.tensor([0, 0, 1000, 1064, 1065, 1500], device="cuda", dtype=torch.int32)
    packed = call(1500, dim, cu_seqlens_q=lengths, cu_seqlens_k=lengths, **how)
    together = launch.forward(packed)[0]
    for first, last in ((0, 1000), (1000, 1064), (1064, 1065), (1065, 1500)):
        q, k, v = (x[:, :, first:last] for x in (packed.q, packed.k, packed.v))
        alone = replace(packed, q=q, k=k, v=v, cu_seqlens_q=None, cu_seqlens_k=None)
        assert torch.equal(launch.forward(alone)[0], together[:, :, first:last])


@on_hopper
@pytest.mark.parametrize("how", [{}, {"right": 0}, {"left": 100, "right": 20}], ids=str)
@pytest.mark.parametrize("length", [64, 130, 1000])
@pytest.mark.parametrize("signs", ["both", "rows without a positive score"])
def test_the_number_of_consumers_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, signs: str, length: int, how: dict[str, Any]
) -> None:
    """Three look for the largest score among whole numbers, where negative ones are in the other order."""
    this = call(length, **how)
    if signs != "both":
        this.k.abs_().neg_()
        this.q[:, :, 5::7].abs_()
    results = []
    for three in (False, True):
        shape = hopper_forward._shape(64, 64, 128, three, wide=False, around=False)
        monkeypatch.setattr(hopper_forward, "shape_of", lambda _, shape=shape: shape)
        replay.forget()
        results.append(launch.forward(this))
    replay.forget()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@on_hopper
@pytest.mark.parametrize("size", [64, 128, 192])
@pytest.mark.parametrize("count", [1, 5, 128, 129, 700])
def test_places_of_packed_tiles(count: int, size: int) -> None:
    generator = torch.Generator().manual_seed(count)
    lengths = [torch.randint(0, 400, (count,), generator=generator).tolist() for _ in "qk"]
    ends = [torch.tensor([0, *each]).cumsum(0, dtype=torch.int32) for each in lengths]
    packed = replace(call(), cu_seqlens_q=ends[0].cuda(), cu_seqlens_k=ends[1].cuda())
    for of, own, end in zip("qk", lengths, ends, strict=True):
        wanted = [
            (number, tile, int(ends[0][number]), lengths[0][number], int(ends[1][number]), lengths[1][number])
            for number, length in enumerate(own)
            for tile in range(-(-length // size))
        ]
        most = int(end[-1]) // size + 1 + count
        first, *fields = places(packed, of, most, size).tolist()
        assert len(fields) == 6 * most
        assert first == len(wanted)
        assert list(zip(*[iter(fields)] * 6, strict=True))[: len(wanted)] == wanted


@on_hopper
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


@on_hopper
def test_a_kernel_leaves_its_counter_at_zero() -> None:
    lengths = torch.tensor([0, 100, 100, 1000], device="cuda", dtype=torch.int32)
    packed = replace(call(right=0), cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    for each in (call(), call(64, right=0), call(dim=128, right=0), call(dim=256, right=0), packed):
        out, lse = launch.forward(each)
        counter = counters.counter(each.q.device)
        assert int(counter[0]) == 0
        for deterministic in (False, True):
            this = replace(each, deterministic=deterministic)
            for _ in range(2):
                launch.backward(this, out, lse, out.clone(), None, False)
                assert int(counter[0]) == 0


@on_hopper
def test_captured_calls_past_the_store_zero_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    this = call(right=0)
    expected = launch.forward(this)[0]
    zeros, _ = counters._COUNTERS[this.q.device.index]
    monkeypatch.setitem(counters._COUNTERS, this.q.device.index, (zeros, iter(())))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.forward(this)[0]
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
