"""Arithmetic that rounds as a plan says: carry in FP32 or FP64, round after every operation.

A native torch operation on bf16 or fp16 tensors computes in FP32 and rounds once, which is exactly that;
so values are held in the native dtype of their format where there is one, and rounded explicitly elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch

from assay.cases.attention.plan import STEPS, Plan
from assay.formats.catalog import BF16, FP16, FP32, FP64
from assay.formats.dtypes import holds
from assay.formats.modes import Rounding
from assay.formats.rounding import round_to
from assay.formats.spec import Format

_NATIVE = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32, FP64: torch.float64}


class Arithmetic:
    """Rounded operations and dot products for one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.carrier = carrier_dtype(plan)

    def hold(self, x: torch.Tensor, fmt: Format) -> torch.Tensor:
        """`x` rounded to `fmt`, in the dtype that values of `fmt` are held in.

        An infinity stays one in formats that have none: −inf stands for a hidden key, not for a number.
        """
        dtype = _NATIVE.get(fmt)
        if dtype is not None and not self.plan.saturate:
            if x.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
                return round_to(x, fmt).to(dtype)  # torch's own cast goes through FP32 and may round twice
            return x.to(dtype)
        rounded = round_to(x, fmt, saturate=self.plan.saturate)
        if not fmt.infinities or self.plan.saturate:
            rounded = torch.where(x.isinf(), x.to(rounded.dtype), rounded)
        return rounded.to(self.carrier if dtype is None else dtype)

    def apply(
        self,
        fmt: Format,
        op: Callable[..., torch.Tensor],
        *operands: torch.Tensor | float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`op(*operands)` rounded to `fmt`; `out`, if it fits, is overwritten with the result."""
        dtype = _NATIVE.get(fmt)
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        if self._is_native(dtype) and all(x.dtype == dtype for x in tensors):
            return op(*operands, out=out) if out is not None else op(*operands)
        carried = [x.to(self.carrier) if isinstance(x, torch.Tensor) else x for x in operands]
        return self.hold(op(*carried), fmt)

    def sum(self, x: torch.Tensor, dim: int, fmt: Format) -> torch.Tensor:
        """Sum over `dim` in the carrier, rounded to `fmt`."""
        if self._is_native(_NATIVE.get(fmt)) and x.dtype == _NATIVE[fmt]:
            return x.sum(dim)  # torch adds 16-bit values up in FP32 and rounds once
        return self.hold(x.to(self.carrier).sum(dim), fmt)

    def dot(self, a: torch.Tensor, b: torch.Tensor, fmt: Format) -> torch.Tensor:
        """The matrix product a·b, summed up in the plan's accumulator and rounded to `fmt`."""
        accumulator = self.plan.accumulator
        if accumulator == FP64 or (accumulator == FP32 and self._fits_fp32(a, b)):
            dtype = torch.float64 if accumulator == FP64 else torch.float32
            narrow = accumulator == FP32 and fmt == BF16 and a.dtype == b.dtype == torch.bfloat16
            if narrow and not self.plan.saturate and _has_bf16_matmul(a.device.type):
                return torch.matmul(a, b)  # FP32 sums, one rounding at the end
            return self.hold(torch.matmul(a.to(dtype), b.to(dtype)), fmt)
        return self.hold(self._short_dot(a, b), fmt)

    def _is_native(self, dtype: torch.dtype | None) -> bool:
        """Whether torch's own operations in `dtype` round as the plan says."""
        if dtype in (torch.float32, torch.float64):
            return True
        return dtype is not None and not self.plan.saturate

    def _fits_fp32(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return self.carrier == torch.float32 or torch.float64 not in (a.dtype, b.dtype)

    def _short_dot(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The product with an accumulator that rounds after every `accumulator_width` products."""
        plan, length = self.plan, a.shape[-1]
        a, b = a.to(self.carrier), b.to(self.carrier)
        rounding: Rounding = "toward_zero" if plan.accumulator_truncates else "nearest_even"
        total: torch.Tensor | None = None
        partial: torch.Tensor | None = None
        for start in range(0, length, plan.accumulator_width):
            stop = min(start + plan.accumulator_width, length)
            product = torch.matmul(a[..., start:stop], b[..., start:stop, :])
            partial = product if partial is None else partial + product
            partial = round_to(partial, plan.accumulator, rounding)
            if plan.promotion is not None and (stop % plan.promotion == 0 or stop == length):
                total = partial if total is None else total + partial
                partial = None
        result = total if total is not None else partial
        assert result is not None
        return result


def carrier_dtype(plan: Plan) -> torch.dtype:
    """FP32 where rounding its results again gives what rounding once would; FP64 elsewhere.

    Rounding twice is harmless for + − × ÷ when the first format has at least 2p + 2 bits, p being those of
    the second: FP32's 24 bits carry formats of up to 11 (fp16, tf32), if the operands are that narrow too. With
    wider operands, as in mixed plans, about one result in 2^13 may be rounded the wrong way. The accumulator is
    a model of a matrix unit, not of one operation: FP32 carries any that it can hold.
    """
    for step in STEPS:
        fmt: Format = getattr(plan, step)
        if fmt == FP32:
            continue
        if fmt.exponent > FP32.exponent or fmt.mantissa > (FP32.mantissa if step == "accumulator" else 10):
            return torch.float64
    return torch.float32


def result_dtype(inputs: torch.dtype, plan: Plan) -> torch.dtype:
    """The inputs' dtype where it holds every value of the output format; else the carrier's."""
    return inputs if holds(inputs, plan.output) else carrier_dtype(plan)


@cache
def _has_bf16_matmul(device: str) -> bool:
    """Whether bf16 matrix products with FP32 sums are faster here than FP32 ones."""
    if device != "cpu":
        return False  # cuBLAS may reduce partial sums in bf16 itself
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe and probe())


def exactly(method: Callable[..., Any]) -> Callable[..., Any]:
    """For `forward(ctx, tensor, …)` and `backward(ctx, tensor)`: nothing but the plan decides what is rounded."""

    @wraps(method)
    def wrapped(ctx: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        with torch.autocast(tensor.device.type, enabled=False), _ieee_matmul():
            return method(ctx, tensor, *rest)

    return wrapped


@contextmanager
def _ieee_matmul() -> Iterator[None]:
    """FP32 products in FP32, whatever the program has set (TF32 on CUDA, bf16 on some CPUs)."""
    candidates: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    backends = [backend for backend in candidates if hasattr(backend, "fp32_precision")]
    before = [backend.fp32_precision for backend in backends]
    if all(precision in ("ieee", "none") for precision in before):
        yield
        return
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
