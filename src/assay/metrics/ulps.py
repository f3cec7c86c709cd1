"""Distances counted in units in the last place (ULPs) of a format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from assay.formats.catalog import get
from assay.formats.spec import Format
from assay.metrics.chunks import check_pair, double_pairs, nonfinite_pairs

_EXPONENT_BITS = 0x7FF0000000000000
DEFAULT_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0)


def ulp_distance(distance: Tensor, reference: Tensor, format: Format) -> Tensor:
    """`distance` in ULPs of `format` at `reference`, both FP64 and finite; a real number, not a step count.

    ulp(r) = 2^(max(floor(log2 |r|), min_exponent) - mantissa), the spacing of the format's grid just
    above |r|. Two grid values in one binade are this many representable steps apart. Beyond the
    format's largest value its grid is thought to go on.
    """
    # Clearing the sign and the mantissa leaves 2^floor(log2 |r|), exactly; the clamp covers subnormals and zero.
    power = (reference.view(torch.int64) & _EXPONENT_BITS).view(torch.float64).clamp_(min=format.smallest_normal)
    # Divide first: power * 2^-mantissa could be subnormal, the quotient cannot.
    return distance.div(power).mul_(2.0**format.mantissa)


@dataclass(frozen=True, slots=True, kw_only=True)
class UlpHistogram:
    """How many outputs lie how many ULPs from the reference."""

    edges: tuple[float, ...]
    """Upper ends of the buckets, themselves included; one more bucket holds what is above the last."""
    counts: tuple[int, ...]
    """Pairs per bucket, over the positions where both are finite; one longer than `edges`."""
    count: int
    """Positions compared."""
    bit_equal: int
    """Positions with the same bits after promotion to FP64: +0 and -0 differ, any two NaNs are equal."""
    nonfinite_mismatch: int
    """Positions that disagree about NaN or an infinity; they are in no bucket."""

    @property
    def bit_equal_share(self) -> float:
        """Share of all positions that are bit-equal."""
        return self.bit_equal / self.count

    @property
    def shares(self) -> tuple[float, ...]:
        """`counts` as shares of all positions."""
        return tuple(n / self.count for n in self.counts)


def ulp_histogram(
    actual: Tensor,
    reference: Tensor,
    format: Format | str,
    edges: Sequence[float] = DEFAULT_EDGES,
) -> UlpHistogram:
    """Count the outputs by their distance from the reference in ULPs of `format` (see `ulp_distance`).

    The default buckets are 0, (0, 0.5], (0.5, 1], (1, 2], (2, 4] and above 4 ULPs.
    """
    a, r = check_pair("ulp_histogram", actual, reference)
    fmt = get(format)
    if not edges or any(x >= y for x, y in pairwise(edges)) or edges[0] < 0:
        raise ValueError(
            f"ulp_histogram: edges must be ascending and not negative, got {tuple(edges)}. "
            f"The default is {DEFAULT_EDGES}."
        )
    bounds = torch.tensor(edges, dtype=torch.float64, device=a.device)
    counts = torch.zeros(len(edges) + 1, dtype=torch.int64, device=a.device)
    equal = torch.zeros((), dtype=torch.int64, device=a.device)
    mismatch = torch.zeros((), dtype=torch.int64, device=a.device)
    for x, y in double_pairs(a, r):
        equal += ((x.view(torch.int64) == y.view(torch.int64)) | (x.isnan() & y.isnan())).sum()
        finite, differ = nonfinite_pairs(x, y)
        mismatch += differ.sum()
        ulps = ulp_distance((x - y).abs_()[finite], y[finite], fmt)
        counts += torch.bincount(torch.bucketize(ulps, bounds), minlength=len(counts))
    return UlpHistogram(
        edges=tuple(float(e) for e in edges),
        counts=tuple(counts.tolist()),
        count=a.numel(),
        bit_equal=int(equal),
        nonfinite_mismatch=int(mismatch),
    )
