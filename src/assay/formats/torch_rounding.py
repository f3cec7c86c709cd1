"""Rounding tensors with plain torch operations, on any device.

The magnitudes are rounded in cache-sized pieces, each in one of three ways:

- *Native cast.* bf16, fp16 and fp32 are cast to and back: torch's own rounding is right there.
- *Magic number.* Let q be the spacing of the format at |x|. Adding C = q·2^(carrier's mantissa bits)
  makes q the last bit of the sum, so that the hardware itself rounds |x| to the nearest multiple
  of q; taking C away again is exact. The other modes follow from the error just made.
- *Integers.* If the format has all the exponent bits of its carrier (tf32 in fp32), C would overflow;
  but then its subnormals are the carrier's too, and rounding is adding to the bits and cutting them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.formats.dtypes import storage_dtype
from assay.formats.modes import overflow_magnitude
from assay.formats.spec import Format

# Pieces that stay in the cache from one operation to the next, yet are few: every operation makes the
# threads wait for each other once. Measured best of 2^14 ... 2^22. Other devices have no such cache.
_CPU_PIECE = 1 << 20
_DEVICE_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class Request:
    """How to round: what the functions below hand to one another."""

    format: Format
    rounding: str
    saturate: bool
    generator: torch.Generator | None


@dataclass(frozen=True, slots=True)
class _Carrier:
    """The layout of the dtype that is computed in."""

    integer: torch.dtype
    exponent: int
    mantissa: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def infinity(self) -> int:
        """The bits of inf, which are also the mask of the exponent."""
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def magnitude(self) -> int:
        """The mask of everything but the sign."""
        return (1 << (self.exponent + self.mantissa)) - 1


_CARRIERS = {
    torch.float32: _Carrier(torch.int32, exponent=8, mantissa=23),
    torch.float64: _Carrier(torch.int64, exponent=11, mantissa=52),
}


def round_flat(x: Tensor, request: Request, working: torch.dtype, result: torch.dtype) -> Tensor:
    """`x`, one-dimensional and contiguous, rounded in dtype `working` and returned in dtype `result`."""
    if (native := _native_cast(request, working)) is not None:
        return _through_cast(x, native, result)
    out = torch.empty(x.shape, dtype=result, device=x.device)
    size = _piece_size(x)
    scratch = torch.empty(min(size, x.numel()), dtype=working, device=x.device)
    work = scratch if result == working else torch.empty_like(scratch)
    for source, target in zip(torch.split(x, size), torch.split(out, size), strict=True):
        # Where the result has the working dtype it is computed in place, without another copy.
        rounded = target if result == working else work[: len(source)]
        _round_piece(source.to(working), request, out=rounded, scratch=scratch[: len(source)])
        if rounded is not target:
            target.copy_(rounded)
    return out


def _native_cast(request: Request, working: torch.dtype) -> torch.dtype | None:
    """The dtype whose cast is exactly the rounding asked for, if there is one.

    From fp64 torch casts to 16 bits through fp32 and so rounds twice. Its fp8 casts differ from one
    version to the next beyond the range, and are no faster on CPU than the magic number.
    """
    if request.rounding != "nearest_even" or request.saturate:
        return None
    exact = (torch.float32,) if working == torch.float64 else (torch.bfloat16, torch.float16)
    native = storage_dtype(request.format)
    return native if native in exact else None


def _through_cast(x: Tensor, native: torch.dtype, result: torch.dtype) -> Tensor:
    size = _piece_size(x)
    if result == native or x.numel() <= size:
        return x.to(native, copy=True).to(result)
    out = torch.empty(x.shape, dtype=result, device=x.device)
    narrow = torch.empty(size, dtype=native, device=x.device)
    for source, target in zip(torch.split(x, size), torch.split(out, size), strict=True):
        target.copy_(narrow[: len(source)].copy_(source))
    return out


def _piece_size(x: Tensor) -> int:
    return _CPU_PIECE if x.is_cpu else _DEVICE_PIECE


def _round_piece(x: Tensor, request: Request, *, out: Tensor, scratch: Tensor) -> None:
    """Write `x`, rounded, into `out`; `scratch` is overwritten."""
    carrier, format = _CARRIERS[x.dtype], request.format
    if _is_plain(request, carrier) and _lies_in_range(x, format):
        _round_plain(x, request, carrier, out, scratch)
        return
    if format.exponent < carrier.exponent:
        _round_by_magic_number(x, request, carrier, out, scratch)
    else:
        _round_by_integers(x, request, carrier, out, scratch)
    if not format.subnormals:
        out.masked_fill_(out < format.smallest_normal, 0.0)
    _replace_overflows(out, x, request)
    torch.copysign(out, x, out=out)


def _is_plain(request: Request, carrier: _Carrier) -> bool:
    """Whether `_round_plain` can do it: nearest even, no flushing, neither all nor none of the mantissa."""
    lift = carrier.mantissa - request.format.mantissa
    return (
        request.rounding == "nearest_even" and request.format.subnormals and request.format.mantissa > 0 and lift >= 2
    )


def _lies_in_range(x: Tensor, format: Format) -> bool:
    """Whether there is no NaN and no overflow to look after. Only asked where the answer costs no waiting."""
    if not x.is_cpu:
        return False
    low, high = torch.aminmax(x)
    return low.item() >= -format.max and high.item() <= format.max


def _round_plain(x: Tensor, request: Request, carrier: _Carrier, out: Tensor, scratch: Tensor) -> None:
    """What nearly every call comes to, in as few passes over memory as possible."""
    bits = x.view(carrier.integer)
    if request.format.exponent == carrier.exponent:
        _cut(bits, x, request, carrier, out=out.view(carrier.integer))
        return
    # q, the spacing of the format at x, is a power of two: x / q is exact, and round() keeps the sign of zero.
    lowest = request.format.min_exponent + carrier.bias
    spacing = torch.bitwise_and(bits, carrier.infinity, out=scratch.view(carrier.integer))
    spacing.clamp_(min=lowest << carrier.mantissa).sub_(request.format.mantissa << carrier.mantissa)
    torch.div(x, scratch, out=out).round_().mul_(scratch)


def _round_by_magic_number(x: Tensor, request: Request, carrier: _Carrier, magnitude: Tensor, scratch: Tensor) -> None:
    magic = _magic_numbers(x, request.format, carrier, out=scratch)
    torch.abs(x, out=magnitude)
    if request.format.mantissa < carrier.mantissa:
        magnitude.add_(magic).sub_(magic)
    else:  # down to C the format is as fine as its carrier: only values below have anything to round
        magnitude.copy_(torch.where(magnitude < magic, (magnitude + magic) - magic, magnitude))
    if request.rounding != "nearest_even":
        _redirect(magnitude, x, spacing=magic.mul_(2.0**-carrier.mantissa), request=request)


def _magic_numbers(x: Tensor, format: Format, carrier: _Carrier, *, out: Tensor) -> Tensor:
    """C for each |x|: the spacing of the format there, times 2^(carrier's mantissa bits)."""
    lift = carrier.mantissa - format.mantissa
    if lift <= 0:
        return out.fill_(math.ldexp(1.0, format.min_exponent + lift))
    lowest = format.min_exponent + carrier.bias  # every subnormal has the spacing of the smallest normal
    highest = 2 * carrier.bias - lift  # keeps C finite; whatever this cuts is beyond the format's range
    bits = out.view(carrier.integer)
    torch.bitwise_and(x.view(carrier.integer), carrier.infinity, out=bits)
    bits.clamp_(lowest << carrier.mantissa, highest << carrier.mantissa).add_(lift << carrier.mantissa)
    return out


def _redirect(magnitude: Tensor, x: Tensor, *, spacing: Tensor, request: Request) -> None:
    """Turn `magnitude`, |x| rounded to nearest even, into |x| rounded in another direction."""
    exact = x.abs()
    if request.rounding == "nearest_away":
        step = exact - magnitude == spacing * 0.5  # the ties that went down
    else:
        torch.where(magnitude > exact, magnitude - spacing, magnitude, out=magnitude)
        rest = exact - magnitude
        match request.rounding:
            case "up":
                step = (rest > 0) & ~x.signbit()
            case "down":
                step = (rest > 0) & x.signbit()
            case "stochastic":
                step = torch.empty_like(x).uniform_(generator=request.generator).mul_(spacing) < rest
            case _:  # toward_zero
                return
    torch.where(step, magnitude + spacing, magnitude, out=magnitude)


def _round_by_integers(x: Tensor, request: Request, carrier: _Carrier, magnitude: Tensor, scratch: Tensor) -> None:
    bits = scratch.view(carrier.integer)
    torch.bitwise_and(x.view(carrier.integer), carrier.magnitude, out=bits)
    _cut(bits, x, request, carrier, out=magnitude.view(carrier.integer))
    magnitude.masked_fill_(x.isnan(), math.nan)  # a carry can run out of a NaN


def _cut(bits: Tensor, x: Tensor, request: Request, carrier: _Carrier, *, out: Tensor) -> None:
    """Round the carrier's `bits` of `x` by cutting those that the format does not have."""
    cut = carrier.mantissa - request.format.mantissa
    if cut == 0:
        out.copy_(bits)
        return
    _write_addends(bits, x, request, cut, out=out)
    out.add_(bits).bitwise_and_(-(1 << cut))


def _write_addends(bits: Tensor, x: Tensor, request: Request, cut: int, *, out: Tensor) -> None:
    """What to add to `bits` so that cutting the last `cut` of them rounds as asked."""
    half, whole = 1 << (cut - 1), 1 << cut
    match request.rounding:
        case "nearest_even":
            torch.bitwise_right_shift(bits, cut, out=out)
            if request.format.mantissa > 0:
                out.bitwise_and_(1)  # is the last bit kept odd?
            else:
                out.clamp_(max=1)  # the last bit kept is the leading one, which is not stored
            out.add_(half - 1)
        case "nearest_away":
            out.fill_(half)
        case "up":
            torch.mul(~x.signbit(), whole - 1, out=out)
        case "down":
            torch.mul(x.signbit(), whole - 1, out=out)
        case "stochastic":
            out.random_(0, whole, generator=request.generator)
        case _:  # toward_zero
            out.zero_()


def _replace_overflows(magnitude: Tensor, x: Tensor, request: Request) -> None:
    """Put max, inf or NaN, as the format and the mode want it, where `magnitude` exceeds the range."""
    largest = request.format.max
    # A look at the largest value costs far less than a mask. NaN fails it too, which is harmless.
    if x.is_cpu and magnitude.max().item() <= largest:
        return
    positive, negative, infinite = (
        overflow_magnitude(request.format, request.rounding, request.saturate, negative=sign, infinite=inf)
        for sign, inf in ((False, False), (True, False), (False, True))
    )
    if positive == negative == infinite == largest:
        magnitude.clamp_(max=largest)
        return
    beyond = magnitude > largest
    if request.rounding in ("up", "down"):  # the only ones that treat the signs differently
        magnitude.masked_fill_(beyond & x.signbit(), negative)
        beyond &= ~x.signbit()
    magnitude.masked_fill_(beyond, positive)
    if not positive == negative == infinite:
        magnitude.masked_fill_(x.isinf(), infinite)
