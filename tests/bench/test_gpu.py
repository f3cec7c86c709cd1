from __future__ import annotations

import pytest
import torch

from assay.bench.contenders import Contender, find_contenders
from assay.bench.figures import Point
from assay.bench.profiling import profile_of
from assay.bench.run import measure
from assay.bench.shapes import Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHORT = Shape(batch=2, heads=4, kv_heads=4, queries=256, keys=256, dim=64, causal=True)


def measured(shape: Shape, only: list[str]) -> Point:
    device = torch.device("cuda")
    point = Point(shape=shape, dtype="bf16")
    measure(point, find_contenders(device, only), backward=True, device=device, rounds=3)
    assert point.reason is None
    return point


def test_short_calls_are_timed_as_cuda_graphs_too() -> None:
    point = measured(SHORT, ["assay", "standard"])
    for figure in point.figures:
        assert figure.reason is None
        assert len(figure.samples) == 3
        assert figure.graph_reason is None
        assert len(figure.graph_samples) == (3 if figure.which == "forward" else 0)
        if figure.seconds is not None and figure.graph_seconds is not None:
            assert 0 < figure.graph_seconds < 1.5 * figure.seconds


def test_what_cannot_be_captured_says_so_and_the_rest_goes_on() -> None:
    device = torch.device("cuda")
    everyone = find_contenders(device, ["assay"])

    def waits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return q * q.flatten()[0].item()

    point = Point(shape=SHORT, dtype="bf16")
    waiting = Contender(name="waits", call=waits, flash=True, takes_groups=True)
    measure(point, [waiting, *everyone], backward=False, device=device, rounds=2)
    first, ours = point.figures
    assert first.graph_reason
    assert not first.graph_samples
    assert len(first.samples) == len(ours.samples) == len(ours.graph_samples) == 2
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_peak_memory_grows_with_the_length_and_not_with_its_square() -> None:
    def peaks(length: int) -> dict[str, int]:
        shape = Shape(batch=1, heads=4, kv_heads=4, queries=length, keys=length, dim=64, causal=True)
        point = measured(shape, ["assay", "standard"])
        return {f.contender: f.peak_bytes or 0 for f in point.figures if f.which == "forward"}

    short, long = peaks(2048), peaks(8192)
    assert short["assay"] >= 4 * 2048 * 64 * 2  # its output at least
    assert long["assay"] < 5 * short["assay"]
    assert long["standard"] > 12 * short["standard"]


def test_profile_finds_our_kernels() -> None:
    device = torch.device("cuda")
    shape = Shape(batch=2, heads=16, kv_heads=16, queries=4096, keys=4096, dim=128, causal=True)
    profile = profile_of(find_contenders(device, ["assay"])[0], shape, "forward+backward", "bf16", device)
    assert profile.attention_share is not None
    assert profile.attention_share > 0.5
    assert any("attention_backward" in part.name for part in profile.parts)
