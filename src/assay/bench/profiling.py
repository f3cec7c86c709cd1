"""Where the time of our own call goes: the share of each kernel, by torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from assay.bench.contenders import Contender
from assay.bench.inputs import draw, work_on
from assay.bench.run import DTYPES
from assay.bench.shapes import Pass, Shape

WANTED = 0.9
"""Share of the GPU's time that our attention kernels should have."""
_OURS = "attention_"
"""In the name of each of our attention kernels."""
_CALLS = 5


@dataclass(frozen=True, slots=True)
class Part:
    """A kernel (on the CPU an operator) and its share of the time."""

    name: str
    share: float
    seconds: float
    """Of one call."""
    launches: float
    """In one call."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The parts of a call, largest first."""

    name: str
    """Of the shape."""
    parts: list[Part]
    attention_share: float | None
    """Of our attention kernels together; None on the CPU, where they are operators of torch."""


def profile_of(contender: Contender, shape: Shape, which: Pass, dtype: str, device: torch.device) -> Profile:
    """Some calls under the profiler, after one that compiles."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library talks on standard error
    work = work_on(contender, which, shape.causal, draw(shape, DTYPES[dtype], device))
    work()
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(_CALLS):
            work()
        if on_gpu:
            torch.cuda.synchronize()
    parts = parts_of(profiler.key_averages(), on_gpu)
    ours = sum(part.share for part in parts if _OURS in part.name) if on_gpu else None
    return Profile(f"{shape.name}, D {shape.dim}, {which}", parts, ours)


def parts_of(events: Iterable[Any], on_gpu: bool) -> list[Part]:
    """Of the profiler's averages: on a GPU the kernels alone, not the operators that launched them."""
    times = [
        (event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in events
        if event.device_type.name == ("CUDA" if on_gpu else "CPU") and not event.is_user_annotation
    ]
    total = sum(microseconds for _, microseconds, _ in times)
    parts = [
        Part(name, microseconds / total, microseconds / 1e6 / _CALLS, count / _CALLS)
        for name, microseconds, count in times
        if microseconds > 0
    ]
    return sorted(parts, key=lambda part: -part.share)
