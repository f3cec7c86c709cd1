"""Whether a problem runs in the fused CUDA kernels."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from assay.cases.attention.problem import Problem


def fused_kernels(problem: Problem) -> tuple[ModuleType, ModuleType] | None:
    """The modules of the forward and backward kernels, or None where torch operations do the work."""
    if not problem.q.is_cuda or find_spec("triton") is None:
        return None
    from assay.cases.attention import triton_backward, triton_forward, triton_steps

    return (triton_forward, triton_backward) if triton_steps.can_fuse(problem) else None
