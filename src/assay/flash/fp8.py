"""Attention on 8-bit inputs: how Q, K and V are quantised, and where that runs. Forward only.

A number x is kept as an 8-bit float and a scale that it shares with others: x ≈ scale · value. Scales are powers of
two, so that nothing but the cast to 8 bits rounds (and what V is less its `centres`, to bf16, before): a floating-point
format loses no precision by it, and what was quantised is a bf16 number again. Infinities and NaN are NaN, as E4M3 has
no infinity, and do not count for a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.flash import gpu
from assay.flash.checks import check_flag
from assay.flash.library import operator

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALINGS = ("tensor", "head", "block")
BLOCK = 128
"""Rows or keys that share a scale."""
LARGEST_PRODUCT = 128
"""Dimensions of V at which Hopper's registers hold a block's P·V beside the output."""
HUGE = 2.0**100
"""Where numbers of V are as large, the dimension's centre is 0: less another, they might be beyond FP32."""
SMALLEST = 2.0**-50
"""A scale at least: that of zeros. The product of two and of the scores' scale is still a number in FP32."""
LONGEST = 160.0
"""A row of Q or K at most, as a vector in units of its scale. Rounded to 8 bits it is at most 10/9 as long: no product
of two rows, nor of their parts, is beyond 32,000, no difference of two beyond FP16, which scores are on Hopper."""
_SIGNS = 0xB95B5F45BD1DDD633352C12AA343622BC6E36AB198F814D88BA2B60962AA107E
"""256 random bits: torch.compile traces no generator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8:
    """How inputs are quantised. The default is the most accurate one that costs little time."""

    format: str = "e4m3"
    """e4m3: 3 bits of mantissa, up to 448. e5m2: 2 bits, up to 57344."""
    scaling: str = "block"
    """What shares a scale: a "tensor", a "head" of it, or a "block" of 128 of its rows or keys. Packed sequences lie in
    one head, one after the other: a block may have rows of two."""
    rotate: bool = True
    """Rotate Q and K by one orthogonal matrix, a Hadamard matrix with random signs: scores stay what they are, and an
    outlier is spread over its whole row."""
    two_level: bool | None = None
    """Hopper: add every block's P·V to the output in FP32. The tensor cores' own sums keep 14 bits, and sums of many
    numbers of one sign come out too small; so with one level V is taken less its `centres`. None: two levels where D_v
    is at most 128, which costs up to a sixth of the kernel's time; beyond, it would double it."""

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise ValueError(f"FP8: format must be one of {', '.join(FORMATS)}, got {self.format!r}.")
        if self.scaling not in SCALINGS:
            raise ValueError(f"FP8: scaling must be one of {', '.join(SCALINGS)}, got {self.scaling!r}.")
        if not isinstance(self.rotate, bool):
            raise ValueError(f"FP8: rotate must be True or False, got {self.rotate!r}.")
        if self.two_level is not None and not isinstance(self.two_level, bool):
            raise ValueError(f"FP8: two_level must be True, False or None, got {self.two_level!r}.")

    @property
    def dtype(self) -> torch.dtype:
        """The 8-bit dtype."""
        return FORMATS[self.format]

    def in_two_levels(self, value_dim: int) -> bool:
        """Whether sums have two levels, for so many dimensions of V."""
        return value_dim <= LARGEST_PRODUCT if self.two_level is None else self.two_level

    def encoded(self) -> str:
        """As one string, as an operator takes it."""
        return ";".join(str(getattr(self, field.name)) for field in fields(self))

    @classmethod
    def decoded(cls, text: str) -> FP8:
        """What `encoded` wrote."""
        form, scaling, rotate, two_level = text.split(";")
        known = {"True": True, "False": False, "None": None}
        return cls(format=form, scaling=scaling, rotate=rotate == "True", two_level=known[two_level])


class Quantized(NamedTuple):
    """8-bit numbers and what they stand for."""

    values: Tensor
    """(B, H, N, D) in an 8-bit dtype, D padded with zeros to a power of two of at least 64."""
    scales: Tensor
    """(B, H, blocks of 128 rows) FP32, powers of two."""

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """values · scales: exact in FP32 and bf16."""
        rows = self.scales.repeat_interleave(BLOCK, 2)[:, :, : self.values.shape[2], None]
        return (self.values.float() * rows).to(dtype)


def quantize(x: Tensor, fp8: FP8 | None = None, *, rotate: bool = False, short: bool = False) -> Quantized:
    """x (B, H, N, D) as 8-bit numbers with scales.

    Args:
        x: bf16, fp16 or FP32, any strides.
        fp8: Format and scaling; its `rotate` is not looked at, since V is not rotated.
        rotate: By the matrix of `rotation`. Q and K rotated alike have the scores that they had.
        short: With scales that make no row longer than 160, as those of Q and K are; else the largest number counts.
    """
    if fp8 is not None and not isinstance(fp8, FP8):
        raise ValueError(f"fp8 must be None or an FP8(format=…, scaling=…), got {fp8!r}.")
    rotate, short = check_flag("rotate", rotate), check_flag("short", short)
    dense = isinstance(x, Tensor) and x.layout is torch.strided
    if not dense or x.dim() != 4 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        got = f"{x.layout} {x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
        raise ValueError(
            f"What is quantised must be a dense tensor, bfloat16, float16 or float32, of shape "
            f"(batch, heads, length, D), got {got}."
        )
    return _quantize(x, None, FP8() if fp8 is None else fp8, rotate, short)


def quantize_values(v: Tensor, fp8: FP8) -> tuple[Quantized, Tensor | None]:
    """V as it is multiplied: with sums of one level less its `centres`, and those; else as it is."""
    off = None if fp8.in_two_levels(v.shape[3]) else centres(v)
    return _quantize(v, off, fp8, False, False), off


def _quantize(x: Tensor, off: Tensor | None, fp8: FP8, rotate: bool, short: bool) -> Quantized:
    """Less what is `off` of every dimension; nothing is of what is rotated."""
    if x.is_cuda:
        with torch.cuda.device(x.device):  # Triton launches on the current device, whatever its arguments say
            quantized: Quantized = import_module("assay.flash.fp8_launch").quantize(x, off, fp8, rotate, short)
        return quantized
    with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):  # a rotation in 16 bits would round
        return _quantize_plainly(x, off, fp8, rotate, short)


def centres(v: Tensor) -> Tensor:
    """(B, H, D padded) FP32: the mean of every dimension of V, of its finite numbers.

    V is quantised less these (see `by_rows`), and they are added to the output: sums of what is left stay small. A row
    that was small beside them is not any more, and keeps less of its precision.

    They are whole steps of bf16 at the dimension's largest number. Else V's own steps would lie unevenly between those
    of 8 bits, and what is rounded off would have a mean.
    """
    if v.is_cuda:
        with torch.cuda.device(v.device):
            found: Tensor = import_module("assay.flash.fp8_launch").centres(v)
        return found
    finite = v.isfinite()
    rows = v.float().where(finite, 0.0)
    mean = rows.sum(2) / finite.sum(2).clamp(min=1)
    largest = rows.abs().amax(2) if rows.shape[2] else torch.zeros_like(mean)
    step = torch.ldexp(torch.ones_like(mean), torch.frexp(largest.clamp(min=2.0**-119))[1] - 8)
    whole = (mean / step + 0.5).floor() * step
    return torch.nn.functional.pad(whole.where(largest < HUGE, 0.0), (0, room(v.shape[3]) - v.shape[3]))


def by_rows(off: Tensor, rows: int) -> Tensor:
    """(B, H, rows, D padded): what each row of V is less. Of the first block nothing: a first token is often small, and
    many queries see most of it.
    """
    return torch.nn.functional.pad(
        off[:, :, None].expand(-1, -1, max(0, rows - BLOCK), -1), (0, 0, min(rows, BLOCK), 0)
    )


def _quantize_plainly(x: Tensor, off: Tensor | None, fp8: FP8, rotate: bool, short: bool) -> Quantized:
    """In plain torch operations."""
    rows, dim = x.shape[2], x.shape[3]
    blocks = -(-rows // BLOCK)
    wide = torch.nn.functional.pad(x.float(), (0, room(dim) - dim))
    if off is not None:
        wide = wide - by_rows(off, rows)
        wide = wide if x.dtype == torch.float32 else wide.bfloat16().float()
    if rotate:
        wide = wide @ rotation(room(dim)).to(x.device)
    finite = wide.isfinite()
    whole = torch.nn.functional.pad(wide.where(finite, 0.0), (0, 0, 0, blocks * BLOCK - rows))
    whole = whole.unflatten(2, (blocks, BLOCK)) if blocks else whole.new_empty(*x.shape[:2], 0, BLOCK, room(dim))
    if short:
        most = whole.double().square().sum(4).amax(3).sqrt().div(LONGEST).float()
    else:
        most = whole.abs().amax((3, 4)) / torch.finfo(fp8.dtype).max
    scales = shared_scales(powers_of_two(most.clamp(min=SMALLEST)), fp8.scaling)
    by_row = scales.repeat_interleave(BLOCK, 2)[:, :, :rows, None]
    return Quantized((wide / by_row).where(finite, torch.nan).to(fp8.dtype), scales)


def powers_of_two(x: Tensor) -> Tensor:
    """The smallest that are not less."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def shared_scales(scales: Tensor, scaling: str) -> Tensor:
    """Those of blocks (B, H, blocks), made one for each head or for all."""
    if scaling == "block" or scales.numel() == 0:
        return scales
    largest = scales.amax(2, keepdim=True) if scaling == "head" else scales.amax()
    return largest.expand_as(scales).contiguous()


def hadamard(dim: int) -> Tensor:
    """(D, D) of ±1."""
    bits = torch.arange(dim, device="cpu")
    both = bits[:, None] & bits[None, :]
    odd = torch.zeros_like(both)
    for i in range(dim.bit_length()):
        odd ^= (both >> i) & 1
    return (1 - 2 * odd).float()


def signs(dim: int) -> Tensor:
    """(D,) of ±1: random, the same ones every time."""
    drawn = [1.0 if _SIGNS >> (255 - i % 256) & 1 else -1.0 for i in range(dim)]
    return torch.tensor(drawn, dtype=torch.float32, device="cpu")


def rotation(dim: int) -> Tensor:
    """(D, D) orthogonal, FP32, for D a power of two: x @ rotation(D) spreads every entry of x over its whole row."""
    return signs(dim)[:, None] * hadamard(dim) * float(dim**-0.5)


def room(dim: int) -> int:
    """The head dimension as quantised numbers have it."""
    return max(64, 1 << (dim - 1).bit_length())


def check_fp8(fp8: object) -> FP8:
    """True: the default."""
    if fp8 is True:
        return FP8()
    if not isinstance(fp8, FP8):
        raise ValueError(f"fp8 must be True, False, None or an FP8(format=…, scaling=…, rotate=…), got {fp8!r}.")
    return fp8


def check_inputs(fp8: object, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> FP8:
    """How q, k and v are to be quantised. FP8 has no gradient, and FP64 no use for it."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, *others)):
        raise ValueError(
            "fp8 has no gradient, and q, k, v, sinks or bias require one. Call it within torch.no_grad(), or detach "
            "them."
        )
    if q.dtype == torch.float64:
        raise ValueError("fp8 takes bfloat16, float16 and float32, got torch.float64. Cast the inputs with .to.")
    return check_fp8(fp8)


def check_alone(fp8: FP8, cu_seqlens: Tensor | None) -> None:
    """Whether no sequence shares a scale with another: else its bits would depend on it."""
    if fp8.scaling == "tensor" or cu_seqlens is not None:
        what = "packed sequences" if cu_seqlens is not None else 'FP8(scaling="tensor")'
        raise ValueError(
            f"batch_invariant with fp8 takes no scale that sequences share, got {what}. "
            'Give a batch, with a scaling of "head" or "block".'
        )


def rounded(q: Tensor, k: Tensor, v: Tensor, fp8: FP8) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V as numbers that 8 bits hold: for what multiplies them in more bits. D is padded where it is rotated.

    16-bit inputs become bf16, which holds every quantised number; V with its centres is rounded to it once more.
    """
    dtype = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    q, k = (quantize(x, fp8, rotate=fp8.rotate, short=True).dequantized(dtype) for x in (q, k))
    with torch.autocast("cpu" if v.is_meta else v.device.type, enabled=False):
        eight, off = quantize_values(v, fp8)
        wide = eight.dequantized() if off is None else eight.dequantized() + by_rows(off, v.shape[2])
    return q, k, wide[..., : v.shape[3]].to(dtype)


def fp8_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    fp8: str,
) -> tuple[Tensor, Tensor]:
    """Output and LSE on Hopper; see `Call` for the arguments."""
    with torch.cuda.device(q.device):
        launch = import_module("assay.flash.fp8_launch")
        out, lse = launch.forward(q, k, v, sinks, scale, left, right, softcap, FP8.decoded(fp8))
    return out, lse


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


attention_fp8 = operator(fp8_forward, fake=_fake)


def takes(q: Tensor, k: Tensor, scale: float, others: tuple[Any, ...]) -> bool:
    """Whether the Hopper kernel can do it; `others` are arguments that it has not."""
    hopper = q.is_cuda and q.dtype != torch.float32 and gpu.takes_hopper_kernels(q.device.index)
    there = q.shape[0] > 0 and q.shape[2] > 0 and k.shape[2] > 0
    return hopper and there and abs(scale) > 1e-7 and all(x is None for x in others)
