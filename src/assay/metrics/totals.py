"""Running sums over pieces of two tensors, from which a Deviation is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from assay.formats.spec import Format
from assay.metrics.chunks import add_up, nonfinite_pairs
from assay.metrics.ulps import ulp_distance


class Sums(NamedTuple):
    """Sums over the finite positions; d = actual - reference."""

    distance: float
    """|d|."""
    error: float
    """d²."""
    actual: float
    """actual²."""
    reference: float
    """reference²."""
    product: float
    """actual · reference."""
    ulps: float
    """|d| / ulp(reference)."""


@dataclass(slots=True)
class Totals:
    """What is known about the pieces seen so far.

    The sums of the pieces are kept apart and added by math.fsum at the end, so that the result depends
    on the cutting only through the last bits of each piece's own sum.
    """

    seen: int = 0
    finite: int = 0
    max: float = -1.0
    max_at: int = 0
    ulp_max: float = 0.0
    nan_actual: int = 0
    nan_reference: int = 0
    inf_actual: int = 0
    inf_reference: int = 0
    mismatch: int = 0
    mismatch_at: int = 0
    _sums: list[Sums] = field(default_factory=list)
    _moments: list[tuple[int, float, float]] = field(default_factory=list)  # n, mean d, sum of (d - mean)²

    def add(self, x: Tensor, y: Tensor, format: Format | None) -> None:
        """Take in one flat FP64 piece of each tensor."""
        d = x - y
        mean = float(d.mean())
        # A mean is finite only if every term is: one reduction instead of many masks for healthy data.
        if math.isfinite(mean):
            self._add_finite(x, y, d, mean, format, positions=None)
        else:
            finite = self._count_nonfinite(x, y)
            d = d[finite]
            if len(d):
                self._add_finite(x[finite], y[finite], d, float(d.mean()), format, finite.nonzero())
        self.seen += len(x)

    def sums(self) -> Sums:
        """The sums over everything seen; NaN if nothing was finite."""
        if not self._sums:
            return Sums(*[math.nan] * 6)
        return Sums(*(add_up(column) for column in zip(*self._sums, strict=True)))

    def mean_and_std(self) -> tuple[float, float]:
        """Mean and population standard deviation of d, the moments merged after Chan et al."""
        n = self.finite
        if n == 0:
            return math.nan, math.nan
        mean = add_up([m * mean for m, mean, _ in self._moments]) / n
        squares = add_up([s + m * (piece - mean) * (piece - mean) for m, piece, s in self._moments])
        return mean, math.sqrt(squares / n)

    def _count_nonfinite(self, x: Tensor, y: Tensor) -> Tensor:
        """Count NaNs, infinities and mismatches, and return where both are finite."""
        finite, mismatch = nonfinite_pairs(x, y)
        masks = (x.isnan(), y.isnan(), x.isinf(), y.isinf(), mismatch)
        nan_x, nan_y, inf_x, inf_y, mismatches = torch.stack([mask.sum() for mask in masks]).tolist()
        self.nan_actual += nan_x
        self.nan_reference += nan_y
        self.inf_actual += inf_x
        self.inf_reference += inf_y
        if mismatches and not self.mismatch:
            self.mismatch_at = self.seen + int(mismatch.nonzero()[0])
        self.mismatch += mismatches
        return finite

    def _add_finite(
        self, x: Tensor, y: Tensor, d: Tensor, mean: float, format: Format | None, positions: Tensor | None
    ) -> None:
        """Add finite pairs; `positions` says where in the piece they stood, None if they are all of it."""
        distance = d.abs()
        centred = d - mean  # squares about the piece's own mean, since E[d²] - E[d]² cancels
        ulps = d.new_zeros(1) if format is None else ulp_distance(distance, y, format)
        figures = [distance.amax(), ulps.amax(), _dot(centred, centred)]
        figures += [distance.sum(), _dot(d, d), _dot(x, x), _dot(y, y), _dot(x, y), ulps.sum()]
        top, ulp_top, squares, *sums = torch.stack(figures).tolist()  # one sync for all of them
        if top > self.max:
            at = int(distance.argmax())
            self.max = top
            self.max_at = self.seen + (at if positions is None else int(positions[at]))
        self.ulp_max = max(self.ulp_max, ulp_top)
        self.finite += len(d)
        self._sums.append(Sums(*sums))
        self._moments.append((len(d), mean, squares))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    # Not torch.dot: BLAS starts its threads however short the vector. And torch's sum is pairwise.
    return (x * y).sum()
