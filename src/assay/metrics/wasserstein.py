"""The Wasserstein distance between the values of two tensors, exactly.

On the line the best transport pairs order statistics, so
W_p = (∫ |Qa(u) - Qb(u)|^p du)^(1/p) with the quantile functions Qa and Qb: sort both, and integrate.
It compares the values as a bag and does not see permutations; print an elementwise figure beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from assay.metrics.chunks import add_up, check_float_tensor, check_same_device, chunk_size
from assay.metrics.cpu_sort import sort_pair
from assay.metrics.sorted_runs import sorted_runs

DEVICE_PIECE = 2**23
"""Elements subtracted at once on an accelerator: a few FP64 pieces of this size are little memory."""


def wasserstein(a: Tensor, b: Tensor, p: float = 1) -> float:
    """W_p between the values of `a` and of `b`, every element weighing the same; sizes may differ.

    Exact: values are sorted in FP32 or FP64 (narrower dtypes are promoted, which loses nothing), then
    subtracted and summed in FP64. The result is NaN if any value is NaN. An infinity paired with a
    finite value gives inf, with the same infinity NaN, as the subtraction says.

    Memory beside the inputs: on the CPU one sorted copy of each (where the radix sort is used, 20 bytes an
    element more while it runs); on CUDA one partitioned copy of each and the workspace of sorting an eighth
    of one. Inputs that are narrower than FP32 or not contiguous are first copied to contiguous FP32 (or
    FP64) there. Without Triton, CUDA is slower, not different.
    """
    a = check_float_tensor("wasserstein", "a", a)
    b = check_float_tensor("wasserstein", "b", b)
    check_same_device("wasserstein", a, b)
    if not isinstance(p, int | float) or not 1 <= p < math.inf:
        raise ValueError(f"wasserstein: p must be a finite number of at least 1, got {p!r}. Use p=1 for W1.")
    a, b = _flat(a), _flat(b)
    if _has_nan(a) or _has_nan(b):
        return math.nan
    n, m = len(a), len(b)
    norms = [_overlap_norm(overlap, p) for overlap in _overlaps(*_both_sorted(a, b), n, m)]
    units = n if n == m else n * m
    return float(_join(norms, p) / units ** (1 / p))


def _flat(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def _piece(x: Tensor) -> int:
    return min(DEVICE_PIECE, chunk_size(x.device))


def _has_nan(x: Tensor) -> bool:
    return math.isnan(float(torch.aminmax(x).min))  # NaN is handed on by aminmax, which needs no mask


def _both_sorted(a: Tensor, b: Tensor) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """Sorted runs of both; on the CPU one of each."""
    if a.device.type != "cpu":
        return sorted_runs(a), sorted_runs(b)
    run_a, run_b = sort_pair(a, b)
    return iter((run_a,)), iter((run_b,))


class _Run(NamedTuple):
    """A sorted run of one of the tensors."""

    values: Tensor
    first: int
    """Rank in its tensor of the run's first element."""
    width: int
    """How much of u one element covers, in units of 1/(n m): m for elements of `a`, n for those of `b`."""

    @property
    def end(self) -> int:
        return (self.first + len(self.values)) * self.width


class _Overlap(NamedTuple):
    """A stretch of u, from `start` to `end`, that one run of `a` and one run of `b` cover.

    In units of 1/(n m) every step of both quantile functions is an integer, so nothing is rounded.
    `start` and `end` are steps of at least one of the two.
    """

    a: _Run
    b: _Run
    start: int
    end: int


def _overlaps(runs_a: Iterator[Tensor], runs_b: Iterator[Tensor], n: int, m: int) -> Iterator[_Overlap]:
    """Walk both sequences of runs at once, from u = 0 to n m."""
    a, b = _Run(next(runs_a), 0, m), _Run(next(runs_b), 0, n)
    u = 0
    while True:
        end = min(a.end, b.end)
        yield _Overlap(a, b, u, end)
        if end == n * m:
            return
        if end == a.end:
            a = _Run(next(runs_a), end // m, m)
        if end == b.end:
            b = _Run(next(runs_b), end // n, n)
        u = end


def _overlap_norm(part: _Overlap, p: float) -> float:
    """The p-norm of Qa - Qb over the stretch, in elements if n = m and in units of 1/(n m) otherwise."""
    if part.a.width == part.b.width:
        return _join(list(_paired_norms(part, p)), p)
    norms = [
        *_step_norms(part, part.a, part.b, p, ties=True),
        *_step_norms(part, part.b, part.a, p, ties=False),
    ]
    return _join(norms, p)


def _paired_norms(part: _Overlap, p: float) -> Iterator[float]:
    """Sizes are equal: the i-th smallest meets the i-th smallest."""
    first, last = part.start // part.a.width, part.end // part.a.width
    a = part.a.values[first - part.a.first : last - part.a.first]
    b = part.b.values[first - part.b.first : last - part.b.first]
    size = _piece(a)
    for start in range(0, len(a), size):
        d = a[start : start + size].double()
        d -= b[start : start + size]
        yield _norm(d, None, p)


def _step_norms(part: _Overlap, x: _Run, y: _Run, p: float, *, ties: bool) -> Iterator[float]:
    """Sizes differ: the intervals that begin with a step of x; each ends at the next step of either.

    Over all steps of `a` and all steps of `b` this is the whole integral, without merging the two. A
    step of both at once would count twice: `ties` says whether it is counted here.
    """
    size = _piece(x.values)
    last = -(-part.end // x.width)
    for first in range(-(-part.start // x.width), last, size):
        rank_x = torch.arange(first, min(first + size, last), device=x.values.device)
        left = rank_x * x.width
        rank_y = left // y.width
        width = torch.minimum(left + x.width, (rank_y + 1) * y.width) - left
        d = x.values[rank_x - x.first].double() - y.values[rank_y - y.first]
        if not ties:
            d.masked_fill_(left == rank_y * y.width, 0.0)
        yield _norm(d, width, p)


def _norm(d: Tensor, weight: Tensor | None, p: float) -> float:
    """(sum of weight |d|^p)^(1/p); d is overwritten. Scaled by max |d|, so that no power leaves FP64."""
    top = 1.0 if p == 1 else float(torch.linalg.vector_norm(d, math.inf))
    if top == 0 or not math.isfinite(top):
        return top
    if top != 1:
        d /= top
    if weight is None:
        return top * float(torch.linalg.vector_norm(d, p))
    total = float(d.abs_().pow_(p).mul_(weight).sum())
    return top * math.pow(total, 1 / p)


def _join(norms: list[float], p: float) -> float:
    """The p-norm of the whole from the p-norms of its parts, scaled as in `_norm`."""
    top = 1.0 if p == 1 else max(norms)
    if top == 0 or not all(map(math.isfinite, norms)):
        return add_up(norms)
    return top * math.pow(add_up([math.pow(norm / top, p) for norm in norms]), 1 / p)
