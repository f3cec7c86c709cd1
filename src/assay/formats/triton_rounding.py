"""Rounding on CUDA: one fused elementwise Triton kernel for every format, mode and dtype.

The results are those of `torch_rounding`, bit for bit; only stochastic rounding draws other numbers.
"""

# mypy: disable-error-code="untyped-decorator"
# (Triton's are.)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.formats.torch_rounding import Request
from assay.formats.triton_functions import (
    LARGEST,
    copy_sign,
    overflow_code,
    overflow_value,
    round_unbounded,
)

_BLOCK, _WARPS = 2048, 8  # eight values for each thread: two 16-byte loads of fp32


def round_flat(x: Tensor, request: Request, working: torch.dtype, result: torch.dtype) -> Tensor:
    """The twin of `torch_rounding.round_flat`."""
    out = torch.empty(x.shape, dtype=result, device=x.device)
    with torch.cuda.device(x.device):
        launch(x, out, request, working)
    return out


def launch(x: Tensor, out: Tensor, request: Request, working: torch.dtype) -> None:
    """Start the kernel that rounds `x` in dtype `working` into `out`; both are flat and contiguous."""
    how = (request.format, request.rounding, request.saturate)
    seed = x  # any pointer will do where no random numbers are drawn
    if request.rounding == "stochastic":  # drawn on the device: the host does not wait for it
        seed = torch.randint(2**62, (1,), device=x.device, generator=request.generator)
    _round_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x,
        out,
        seed,
        x.numel(),
        ROUNDING=request.rounding,
        MANTISSA=request.format.mantissa,
        MIN_EXPONENT=request.format.min_exponent,
        MAX=request.format.max,
        FLUSH=not request.format.subnormals,
        POSITIVE=overflow_code(*how),
        NEGATIVE=overflow_code(*how, negative=True),
        INFINITE=overflow_code(*how, infinite=True),
        DOUBLE=working == torch.float64,
        BLOCK=_BLOCK,
        enable_fp_fusion=True,
        num_warps=_WARPS,
    )


@triton.jit
def _round_kernel(
    x_pointer: tl.tensor,
    out_pointer: tl.tensor,
    seed_pointer: tl.tensor,
    count: tl.tensor,
    ROUNDING: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    FLUSH: tl.constexpr,
    POSITIVE: tl.constexpr,
    NEGATIVE: tl.constexpr,
    INFINITE: tl.constexpr,
    DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """POSITIVE, NEGATIVE and INFINITE are the overflow codes of finite values and of infinities."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_pointer + offsets, mask=inside, other=0.0).to(tl.float64 if DOUBLE else tl.float32)
    random = x
    if ROUNDING == "stochastic":
        random = _uniform(tl.load(seed_pointer), first, BLOCK).to(x.dtype)
    rounded = round_unbounded(x, random, ROUNDING, MANTISSA, MIN_EXPONENT, FLUSH)
    beyond = tl.where(x < 0, overflow_value(x, MAX, NEGATIVE), overflow_value(x, MAX, POSITIVE))
    beyond = tl.where(tl.abs(x) == float("inf"), overflow_value(x, MAX, INFINITE), beyond)
    # A bare MAX would be taken for fp32, and 65535.99 for 65536.
    largest = overflow_value(x, MAX, LARGEST)
    rounded = copy_sign(tl.where(rounded > largest, beyond, rounded), x)
    tl.store(out_pointer + offsets, rounded.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def _uniform(seed: tl.tensor, first: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """24 random bits for each of the BLOCK offsets from `first` on, as floats in [0, 1). Philox draws four at once."""
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    low = counter.to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, (counter >> 32).to(tl.uint32), low * 0, low * 0)
    bits = tl.join(tl.join(a, b), tl.join(c, d)).reshape(BLOCK)
    return (bits >> 8).to(tl.float32) * 2.0**-24
