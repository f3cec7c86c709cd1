"""Whether a problem runs in the fused CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from assay.cases.attention.problem import Problem

_switch = {"fuse": True}  # for all threads: autograd runs backward in one of its own


@contextmanager
def as_torch_operations() -> Iterator[None]:
    """Inside, everything runs as torch operations. The fused kernels are compiled for each plan, for seconds."""
    before = _switch["fuse"]
    _switch["fuse"] = False
    try:
        yield
    finally:
        _switch["fuse"] = before


def fused_kernels(problem: Problem) -> tuple[ModuleType, ModuleType] | None:
    """The modules of the forward and backward kernels, or None where torch operations do the work."""
    if not problem.q.is_cuda or not _switch["fuse"] or find_spec("triton") is None:
        return None
    from assay.cases.attention import triton_backward, triton_forward, triton_steps

    return (triton_forward, triton_backward) if triton_steps.can_fuse(problem) else None
