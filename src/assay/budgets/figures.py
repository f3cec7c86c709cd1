"""How far an implementation and its baseline are from the golden value, on one seed.

Below either error lies a floor: what rounding the golden value once to the output's format may cost, half an ULP at
most, ULP/√12 in RMSE. No implementation can be asked for less, and a baseline that happens to be exact, or whose
golden value the format happens to hold, does not ask for it.

Largest error and RMSE are those of the largest results. What happens to the small ones is seen in ULPs. Where large
numbers cancel a few results are millions of ULPs off, in any implementation, and they alone make the mean; so bits are
averaged, the logarithm of ULPs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from assay.budgets.runs import Three
from assay.formats.dtypes import format_of
from assay.formats.spec import Format
from assay.metrics.deviation import Deviation, deviation
from assay.metrics.ulps import ulp_distance

BITS_OF_ROUNDING = 3 * math.log2(1.5) - 1 / math.log(2)
"""Mean of log2(1 + ULPs) where nothing but the rounding of the result is wrong, 0 to ½ ULP alike often: 0.31 bits. The
most it can be is log2 1.5 = 0.58, so the ratio of a result that is rounded right is 2^0.27 = 1.21 at most."""


class Errors(NamedTuple):
    """How far from the golden value: on one seed, or over all of them."""

    max: float
    rmse: float
    bias: float
    """Mean of the signed error."""
    outward: float
    """Mean of the error away from zero. Truncation is negative here, while its signed errors may cancel."""
    ulp_max: float
    ulp_mean: float
    bits: float
    """Mean of log2(1 + ULPs): how many of the last bits are wrong."""


class Worst(NamedTuple):
    """The element that is farthest from the golden value, or the first NaN or infinity in a wrong place."""

    seed: int | None
    position: tuple[int, ...]
    fn: float
    baseline: float
    golden: float


class Measured(NamedTuple):
    """One output or gradient on one seed."""

    fn: Errors
    baseline: Errors
    floor: Errors
    numbers: int
    """Numbers compared."""
    misplaced: int
    """Where fn is NaN or infinite and the golden value is not, or the other way round."""
    worst: Worst

    @property
    def ratio_max(self) -> float:
        """Of the largest errors."""
        return self.fn.max / max(self.baseline.max, self.floor.max)

    @property
    def ratio_rmse(self) -> float:
        """Of the root mean square errors."""
        return self.fn.rmse / max(self.baseline.rmse, self.floor.rmse)


def measure(three: Three, seed: int | None) -> Measured:
    """Measure one output or gradient on one seed; a baseline that cannot be a measure is refused."""
    unit = format_of(three.baseline.dtype)
    rounded = three.golden.to(three.baseline.dtype).double()
    # Where the format cannot hold the golden value an infinity is right.
    golden = torch.where(rounded.isfinite(), three.golden, rounded)
    finite = golden[golden.isfinite()]
    if not finite.numel():
        raise ValueError(
            "The golden value must be finite somewhere, but it is NaN or infinite throughout. Check inputs."
        )
    fn, baseline = (x.double() for x in (three.fn, three.baseline))
    found, plain = (deviation(x, golden, unit, quantiles=()) for x in (fn, baseline))
    if plain.nonfinite_mismatch:
        at = plain.max_index
        raise ValueError(
            "The baseline must be finite where the golden value is, else it is no measure; at index "
            f"{at} it is {baseline[at].item():g} and the golden value is {golden[at].item():g}. "
            "Use inputs that the baseline can take, or a baseline that takes these."
        )
    ulp = ulp_distance(torch.ones_like(finite), finite, unit).reciprocal_()
    at = found.max_index
    return Measured(
        fn=_errors(found, fn, golden, unit),
        baseline=_errors(plain, baseline, golden, unit),
        floor=Errors(
            ulp.max().item() / 2, math.sqrt(ulp.square().mean().item() / 12), 0.0, 0.0, 0.5, 0.25, BITS_OF_ROUNDING
        ),
        numbers=found.count,
        misplaced=found.nonfinite_mismatch,
        worst=Worst(seed, at, fn[at].item(), baseline[at].item(), golden[at].item()),
    )


def _errors(found: Deviation, actual: torch.Tensor, golden: torch.Tensor, unit: Format) -> Errors:
    """Those of nothing, where no number is finite, are NaN."""
    both = actual.isfinite() & golden.isfinite()
    away = ((actual - golden) * golden.sign())[both]
    ulp_max, ulp_mean = found.ulp_max or 0.0, found.ulp_mean or 0.0  # None without a format, but there is one
    bits = _bits(actual[both], golden[both], unit)
    return Errors(found.max, found.rmse, found.bias, away.mean().item(), ulp_max, ulp_mean, bits)


def _bits(actual: torch.Tensor, golden: torch.Tensor, unit: Format) -> float:
    """Without results so small that FP64's own error, 2^-53 of the largest, is more than half an ULP of theirs."""
    if not golden.numel():
        return math.nan
    size = golden.abs()
    kept = size >= 2.0 ** (unit.mantissa + 1 - 53) * size.max()
    return ulp_distance((actual - golden).abs()[kept], golden[kept], unit).add_(1).log2_().mean().item()
