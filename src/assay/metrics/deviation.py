"""What separates two tensors, elementwise.

`deviation(actual, reference)` answers with one record: how large the differences are (maximum, mean,
standard deviation, RMSE, quantiles, ULPs), whether they lean to one side (signed bias with its
confidence interval), and whether anything stopped being a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist

from torch import Tensor

from assay.formats.catalog import get
from assay.formats.spec import Format
from assay.metrics.chunks import check_pair, double_pairs
from assay.metrics.order_statistics import quantiles as exact_quantiles
from assay.metrics.totals import Sums, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """How `actual` differs from `reference`; d = actual - reference, in FP64.

    All figures are over the positions where both are finite. Equal infinities and NaN against NaN are
    agreement and enter no figure. A position where only one is NaN, or where an infinity meets anything
    else, is a mismatch: then `max` and `ulp_max` are inf, so that `max <= bound` fails and a NaN cannot
    hide. With no finite position at all the figures are NaN, which fails every comparison too.
    """

    max: float
    """max |d|; inf if there is any mismatch."""
    max_index: tuple[int, ...]
    """Where: the first mismatch if there is one, else the first position of max |d|."""
    mean: float
    """mean |d|."""
    std: float
    """Standard deviation of the signed d (population: divided by n), so rmse² = bias² + std²."""
    rmse: float
    """Root of mean d²."""
    relative: float
    """‖d‖₂ / ‖reference‖₂; 0 for 0/0, inf where only the reference is 0."""
    bias: float
    """Signed mean of d."""
    bias_interval: tuple[float, float]
    """Normal-theory confidence interval of the mean of d, as though the positions were independent."""
    confidence: float
    """Confidence of `bias_interval`."""
    ulp_max: float | None
    """max |d| / ulp(reference) in the format (see `ulps.ulp_distance`); None without a format."""
    ulp_mean: float | None
    """mean |d| / ulp(reference); None without a format."""
    format: str | None
    """Name of the format whose ULPs are counted."""
    quantiles: dict[float, float]
    """Quantiles of |d|, exact at any size, linear between order statistics."""
    cosine: float
    """Cosine between the two; NaN where either is all zeros."""
    sqnr: float
    """Signal to quantization noise in dB, 10 log10(‖reference‖² / ‖d‖²); inf when d is 0."""
    count: int
    """Positions compared, non-finite ones included."""
    finite: int
    """Positions where both are finite."""
    nan_actual: int
    nan_reference: int
    inf_actual: int
    inf_reference: int
    nonfinite_mismatch: int
    """Positions that disagree about NaN or an infinity."""

    def as_dict(self) -> dict[str, object]:
        """The record as plain JSON values; NaN and infinities become the strings "nan", "inf", "-inf"."""
        return {field.name: _json_safe(getattr(self, field.name)) for field in fields(self)}


def deviation(
    actual: Tensor,
    reference: Tensor,
    format: Format | str | None = None,
    *,
    quantiles: Sequence[float] = (0.5, 0.9, 0.99, 0.999),
    confidence: float = 0.95,
) -> Deviation:
    """Measure how `actual` differs from `reference`; see `Deviation` for every figure.

    Both are floating-point tensors of one shape on one device, of any strides and any (also different)
    float dtypes. Everything is computed in FP64, in pieces, so that memory beside the inputs stays
    bounded at any size. Squares are formed in FP64: only FP64 inputs beyond 1e±154 can leave its range.
    `format` (a Format or its name) asks for distances in its ULPs as well.
    """
    a, r = check_pair("deviation", actual, reference)
    _check_options(quantiles, confidence)
    unit = None if format is None else get(format)
    total = Totals()
    for x, y in double_pairs(a, r):
        total.add(x, y, unit)
    sums, n = total.sums(), total.finite
    bias, std = total.mean_and_std()
    return Deviation(
        max=_worst(total.max, total),
        max_index=_unravel(total.mismatch_at if total.mismatch else total.max_at, tuple(a.shape)),
        mean=_ratio(sums.distance, n),
        std=std,
        rmse=math.sqrt(_ratio(sums.error, n)),
        relative=math.sqrt(_ratio(sums.error, sums.reference)),
        bias=bias,
        bias_interval=_interval(bias, std, n, confidence),
        confidence=confidence,
        format=None if unit is None else unit.name,
        ulp_max=None if unit is None else _worst(total.ulp_max, total),
        ulp_mean=None if unit is None else _ratio(sums.ulps, n),
        quantiles=exact_quantiles(lambda: _distances(a, r), n, quantiles),
        cosine=_cosine(sums),
        sqnr=_sqnr(sums),
        count=total.seen,
        finite=n,
        nan_actual=total.nan_actual,
        nan_reference=total.nan_reference,
        inf_actual=total.inf_actual,
        inf_reference=total.inf_reference,
        nonfinite_mismatch=total.mismatch,
    )


def _check_options(quantiles: Sequence[float], confidence: float) -> None:
    if not all(0.0 <= q <= 1.0 for q in quantiles):
        raise ValueError(f"deviation: quantiles must lie in [0, 1], got {tuple(quantiles)}. Use 0.99 for 99%.")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"deviation: confidence must lie in (0, 1), got {confidence}. Use 0.95 for 95%.")


def _distances(a: Tensor, r: Tensor) -> Iterator[Tensor]:
    """|a - r| in pieces, over the positions where both are finite."""
    for x, y in double_pairs(a, r):
        d = x - y
        if not math.isfinite(float(d.sum())):
            d = d[x.isfinite() & y.isfinite()]
        yield d.abs_()


def _worst(finite_max: float, total: Totals) -> float:
    """The largest finite figure, unless a mismatch or the lack of any finite pair overrules it."""
    if total.mismatch:
        return math.inf
    return finite_max if total.finite else math.nan


def _ratio(part: float, whole: float) -> float:
    """part / whole, with 0/0 = 0 and x/0 = inf; a NaN part stays NaN."""
    if whole == 0:
        return 0.0 if part == 0 else part * math.inf
    return part / whole


def _interval(mean: float, std: float, n: int, confidence: float) -> tuple[float, float]:
    """mean ± z s/√n, where s² = std² n/(n-1) estimates the variance of one difference."""
    if n < 2:
        return -math.inf, math.inf
    half = NormalDist().inv_cdf((1 + confidence) / 2) * std / math.sqrt(n - 1)
    return mean - half, mean + half


def _cosine(sums: Sums) -> float:
    norms = math.sqrt(sums.actual) * math.sqrt(sums.reference)
    return max(-1.0, min(1.0, sums.product / norms)) if norms > 0 else math.nan


def _sqnr(sums: Sums) -> float:
    if math.isnan(sums.error):
        return math.nan
    if sums.error == 0:
        return math.inf
    return 10 * math.log10(sums.reference / sums.error) if sums.reference > 0 else -math.inf


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        index.append(i)
    return tuple(reversed(index))


def _json_safe(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return [_json_safe(v) for v in value]
    if isinstance(value, dict):
        return {str(key): _json_safe(v) for key, v in value.items()}
    return value
