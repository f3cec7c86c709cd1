from __future__ import annotations

from types import SimpleNamespace

from assay.bench.contenders import find_contenders
from assay.bench.profiling import parts_of, profile_of
from tests.bench.test_run import CPU, TINY


def event(key: str, device: str, device_time: float, cpu_time: float = 0.0, annotation: bool = False) -> object:
    return SimpleNamespace(
        key=key,
        device_type=SimpleNamespace(name=device),
        self_device_time_total=device_time,
        self_cpu_time_total=cpu_time,
        count=5,
        is_user_annotation=annotation,
    )


def test_on_a_gpu_only_kernels_count() -> None:
    events = [
        event("aten::op that launched it", "CPU", 90.0, 7.0),
        event("attention_forward", "CUDA", 90.0),
        event("fill", "CUDA", 10.0),
        event("a range", "CUDA", 100.0, annotation=True),
    ]
    parts = parts_of(events, on_gpu=True)
    assert [(part.name, part.share, part.launches) for part in parts] == [
        ("attention_forward", 0.9, 1.0),
        ("fill", 0.1, 1.0),
    ]
    assert [part.name for part in parts_of(events, on_gpu=False)] == ["aten::op that launched it"]
    assert parts_of([], on_gpu=True) == []


def test_operators_on_the_cpu() -> None:
    profile = profile_of(find_contenders(CPU, ["assay"])[0], TINY, "forward+backward", "fp32", CPU)
    assert profile.attention_share is None
    assert abs(sum(part.share for part in profile.parts) - 1) < 1e-9
    assert any("backward" in part.name for part in profile.parts)
    assert [part.share for part in profile.parts] == sorted((part.share for part in profile.parts), reverse=True)
