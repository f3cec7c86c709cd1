from __future__ import annotations

import pytest
import torch

from benchmarks.bench_record import contenders, measure
from benchmarks.record import CUDNN, FA2, FP8_KERNEL, FP16, OURS, PLAIN, Case, Part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("part", ["forward", "backward", "both"])
def test_plain_as_graphs_and_from_python(part: Part) -> None:
    case = Case(dim=64, length=1024, causal=True, parts=(part,))
    point = measure(case, part, contenders(case, flex=False), rounds=2, eager=True)
    assert {OURS, FA2} <= set(point.ms) & set(point.eager_ms), point.missing
    assert 0 < point.ms[OURS] < 1.5 * point.eager_ms[OURS]
    assert 0.05 < (point.ceiling_share or 0) < 1.2


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_packed_beside_its_twin(part: Part) -> None:
    case = Case(kind="packed", dim=64, length=16384, causal=True, packed=16 * (1024,), parts=(part,))
    point = measure(case, part, contenders(case, flex=False), rounds=2, eager=False)
    assert set(point.ms) == {OURS, PLAIN}, point.missing


@pytest.mark.parametrize(("kind", "everybody"), [(FP16, {OURS, CUDNN}), (FP8_KERNEL, {OURS, PLAIN})])
def test_other_formats(kind: str, everybody: set[str]) -> None:
    case = Case(kind=kind, dim=128, length=4096, causal=True, parts=("forward",))
    point = measure(case, "forward", contenders(case, flex=False), rounds=2, eager=False)
    assert set(point.ms) == everybody, point.missing
