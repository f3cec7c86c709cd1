"""Does the emulation do what a real kernel does? Both against golden, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from assay.cases.attention.golden import golden_attention, golden_gradients
from assay.cases.attention.kernels import Kernel, available_kernels, is_refusal
from assay.cases.attention.plan import Plan
from assay.metrics.deviation import deviation
from assay.metrics.ulps import ulp_histogram

TOLERANCE = 0.02
"""An emulation matches a kernel when its RMSE against golden is within this of the kernel's."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PARTS = ("output", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One tensor of one kernel beside its emulation."""

    kernel: str
    format: str
    causal: bool
    shape: tuple[int, int, int, int]
    distribution: str
    seed: int
    device: str
    part: str
    """output, dq, dk or dv."""
    plan: str
    tiling: str
    kernel_rmse: float
    """Of the kernel against golden."""
    emulation_rmse: float
    """Of the emulation against golden."""
    shipped_rmse: float
    """Of the emulation with the plain `shipped` plan against golden."""
    bit_equal: float
    """Share of elements where kernel and emulation have the same bits."""
    ulp_edges: tuple[float, ...]
    """Upper ends of the ULP buckets; one more bucket above the last."""
    notes: tuple[str, ...]
    """What is known not to match, and why."""
    ulp_shares: tuple[float, ...]
    """Share of elements by the distance kernel ↔ emulation in ULPs of the format."""

    @property
    def ratio(self) -> float:
        """RMSE of the emulation over that of the kernel; 1 where neither errs."""
        return _ratio(self.emulation_rmse, self.kernel_rmse)

    @property
    def shipped_ratio(self) -> float:
        """The same with the plain `shipped` plan."""
        return _ratio(self.shipped_rmse, self.kernel_rmse)

    @property
    def matches(self) -> bool:
        """Whether the two RMSEs are within the tolerance of each other."""
        return abs(self.ratio - 1) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "shipped_ratio": self.shipped_ratio,
            "matches": self.matches,
        }


def _ratio(ours: float, theirs: float) -> float:
    if theirs == 0:
        return 1.0 if ours == 0 else math.inf
    return ours / theirs


def validate(
    *,
    device: str = "cpu",
    formats: tuple[str, ...] = ("bf16", "fp16"),
    shape: tuple[int, int, int, int] = (1, 4, 1024, 64),
    seed: int = 0,
) -> Iterator[Agreement]:
    """Run every kernel of `device`, full and causal, forward and backward, and compare its emulation.

    Inputs are N(0, 1), rounded to the format. Yields a row as soon as it is measured.
    """
    unknown = [repr(f) for f in formats if f not in _DTYPES]
    if unknown:
        raise ValueError(f"Kernels take {', '.join(_DTYPES)}; got {', '.join(unknown)}.")
    for kernel in available_kernels(torch.device(device)):
        for fmt in formats:
            for causal in (False, True):
                yield from _compare(kernel, fmt, causal, shape, device, seed)


def _compare(
    kernel: Kernel, fmt: str, causal: bool, shape: tuple[int, int, int, int], device: str, seed: int
) -> Iterator[Agreement]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, _DTYPES[fmt]) for _ in range(4))
    try:
        real = _with_gradients(lambda q, k, v: kernel.call(q, k, v, causal), q, k, v, grad)
    except RuntimeError as error:
        if is_refusal(error):
            return  # this kernel does not take this format or shape
        raise
    golden = (
        golden_attention(q, k, v, causal=causal),
        *golden_gradients(q, k, v, grad, causal=causal),
    )
    plan, shipped = kernel.plan(fmt), Plan.shipped(fmt)
    emulated = _with_gradients(lambda q, k, v: kernel.emulate(q, k, v, causal, plan), q, k, v, grad)
    plain = _with_gradients(lambda q, k, v: kernel.emulate(q, k, v, causal, shipped), q, k, v, grad)
    if kernel.own_p:
        emulated = (*emulated[:3], plain[3])
    tiling = "not tiled" if kernel.tiling is None else _tiling_name(kernel.tiling(q, k))
    for part, theirs, ours, simple, truth in zip(_PARTS, real, emulated, plain, golden, strict=True):
        histogram = ulp_histogram(ours, theirs, fmt)
        yield Agreement(
            kernel=kernel.name,
            format=fmt,
            causal=causal,
            shape=shape,
            distribution="N(0, 1)",
            seed=seed,
            device=_device_name(device),
            part=part,
            plan=plan.name,
            tiling=tiling,
            kernel_rmse=deviation(theirs, truth).rmse,
            emulation_rmse=deviation(ours, truth).rmse,
            shipped_rmse=deviation(simple, truth).rmse,
            bit_equal=histogram.bit_equal_share,
            notes=kernel.notes,
            ulp_edges=histogram.edges,
            ulp_shares=histogram.shares,
        )


def _with_gradients(
    attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def _tiling_name(tiling: dict[str, Any]) -> str:
    splits = tiling.get("splits", 1)
    return str(tiling["block"]) + (f" in {splits} parts" if splits > 1 else "")


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU"
