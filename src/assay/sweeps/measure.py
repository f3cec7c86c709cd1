"""Measuring a point: the variant, the baseline and golden on the same inputs, and what separates them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import torch

from assay.cases.attention.baseline import baseline_attention
from assay.cases.attention.fused import as_torch_operations
from assay.cases.attention.golden import golden_attention, golden_gradients
from assay.cases.attention.inputs import Inputs, draw_inputs, how_called
from assay.cases.attention.kernels import Kernel, available_kernels, is_refusal
from assay.cases.attention.plan import Plan
from assay.cases.attention.tiled import tiled_attention
from assay.formats.catalog import get
from assay.formats.dtypes import holds
from assay.formats.rounding import round_to
from assay.metrics.deviation import Deviation, deviation
from assay.metrics.wasserstein import wasserstein
from assay.results.environment import environment
from assay.results.record import SCHEMA, Record
from assay.sweeps.point import FLASH, Point

TENSORS = ("output", "dq", "dk", "dv")
_WORTH_COMPILING = 1 << 27
"""Scores of a call from which a fused kernel for its plan, compiled for seconds, pays over the seeds of a sweep."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "q999": 0.999}

Tensors = dict[str, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class NotTakenError(Exception):
    """A real kernel does not take these inputs."""


class Bench:
    """The inputs of a group of points, and what those points share: golden, baselines, kernels' results."""

    def __init__(self, point: Point, device: str) -> None:
        self.device = device
        drawn = draw_inputs(point.inputs, point.shape, point.seed)
        self.drawn = Inputs(*(x.to(device) for x in drawn))
        scale, bias = how_called(point.inputs, point.seed)
        self.bias = None if bias is None else bias.to(device)
        self._how: dict[str, Any] = {"causal": point.causal, "scale": scale, "bias": self.bias}
        self.environment = environment(device)
        self._kept: dict[tuple[object, ...], Tensors] = {}

    def measure(self, point: Point) -> Record:
        """The record of one point of the group."""
        start = time.perf_counter()
        first, again = self._variant(point), self._variant(point, again=True)
        golden = self._golden(point.format, point.tensor)
        baseline = self._baseline(point)
        before = self._unrounded(point.tensor)
        moved = deviation(golden, before, quantiles=())
        return {
            "schema": SCHEMA,
            "id": point.id(self.environment["device"]),
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **self.environment,
            **point.coordinates(),
            **_figures("error", first, golden, point.format),
            **_figures("baseline_error", baseline, golden, point.format),
            **_figures("difference", first, baseline, point.format),
            "null_max": 0.0 if _same(again, first) else deviation(again, first, quantiles=()).max,
            "golden_rms": float(golden.square().mean().sqrt()),
            "inputs_error_max": moved.max,
            "inputs_error_rmse": moved.rmse,
            "seconds": time.perf_counter() - start,
        }

    def _keep(self, key: tuple[object, ...], compute: Callable[[], Tensors]) -> Tensors:
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def _rounded(self, format: str) -> Inputs:
        """In the format's own dtype where there is one that attention takes: real kernels need it."""
        dtype = _DTYPES.get(format, torch.float32 if holds(torch.float32, get(format)) else torch.float64)
        key = ("inputs", format)
        found = self._keep(key, lambda: {str(i): round_to(x, format).to(dtype) for i, x in enumerate(self.drawn)})
        return Inputs(*found.values())

    def _golden(self, format: str, tensor: str) -> torch.Tensor:
        inputs = self._rounded(format)
        return self._keep(("golden", format, tensor == "output"), lambda: self._true_values(inputs, tensor))[tensor]

    def _unrounded(self, tensor: str) -> torch.Tensor:
        return self._keep(("unrounded", tensor == "output"), lambda: self._true_values(self.drawn, tensor))[tensor]

    def _true_values(self, inputs: Inputs, tensor: str) -> Tensors:
        if tensor == "output":
            return {"output": golden_attention(*inputs[:3], **self._how)}
        return dict(zip(TENSORS[1:], golden_gradients(*inputs, **self._how), strict=True))

    def _baseline(self, point: Point) -> torch.Tensor:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return baseline_attention(q, k, v, plan=point.baseline, **self._how)

        gradients = point.tensor != "output"
        key = ("baseline", point.format, _identity(point.baseline), gradients)
        return self._keep(key, lambda: _run(call, self._rounded(point.format), gradients))[point.tensor]

    def _variant(self, point: Point, again: bool = False) -> torch.Tensor:
        inputs, gradients = self._rounded(point.format), point.tensor != "output"
        if point.variant == FLASH:
            return _run(lambda q, k, v: self._flash(point, q, k, v), inputs, gradients)[point.tensor]
        kernel = next(k for k in available_kernels(torch.device(self.device)) if k.name == point.variant)
        key = ("kernel", point.variant, point.format, again)
        return self._keep(key, lambda: self._kernel(kernel, inputs))[point.tensor]

    def _kernel(self, kernel: Kernel, inputs: Inputs) -> Tensors:
        """Its output and gradients; a NotTakenError if it does not take these inputs."""
        bias = self.bias
        if bias is not None and bias.dtype != torch.bool:
            bias = bias.to(inputs.q.dtype)  # as kernels want it

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return kernel.call(q, k, v, self._how["causal"], scale=self._how["scale"], bias=bias)

        try:
            with warnings.catch_warnings(action="ignore"):  # torch says at length why not
                return _run(call, inputs, True)
        except RuntimeError as error:
            if is_refusal(error):
                raise NotTakenError(kernel.name) from error
            raise

    def _flash(self, point: Point, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"order": point.order, "block": point.block, **point.options}
        small = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] < _WORTH_COMPILING
        with as_torch_operations() if small else nullcontext():
            return tiled_attention(q, k, v, plan=point.plan, **self._how, **options)


def _run(attention: Attention, inputs: Inputs, gradients: bool) -> Tensors:
    """The output and, where asked, the gradients."""
    if not gradients:
        with torch.no_grad():
            return {"output": attention(*inputs[:3])}
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    out = attention(*leaves)
    found = torch.autograd.grad(out, leaves, inputs.grad.to(out.dtype))
    return dict(zip(TENSORS, (out.detach(), *found), strict=True))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all values are equal, NaN where NaN is: a result that overflowed everywhere is the same one too."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _identity(plan: Plan) -> tuple[object, ...]:
    return tuple(value for name, value in plan.as_dict().items() if name != "name")


def _figures(comparison: str, actual: torch.Tensor, reference: torch.Tensor, format: str) -> dict[str, float | int]:
    """The columns of one comparison."""
    found: Deviation = deviation(actual, reference, format, quantiles=tuple(_QUANTILES.values()))
    figures = {
        **{name: getattr(found, name) for name in ("max", "mean", "std", "rmse", "relative", "bias")},
        "bias_low": found.bias_interval[0],
        "bias_high": found.bias_interval[1],
        "ulp_max": found.ulp_max,
        "ulp_mean": found.ulp_mean,
        **{name: found.quantiles[q] for name, q in _QUANTILES.items()},
        "cosine": found.cosine,
        "sqnr": found.sqnr,
        "w1": wasserstein(actual.double(), reference.double()),
        "nonfinite": found.nonfinite_mismatch,
    }
    return {f"{comparison}_{name}": value for name, value in figures.items()}
