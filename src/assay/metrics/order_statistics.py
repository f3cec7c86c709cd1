"""Exact order statistics of more values than one would like to hold in memory.

Non-negative FP64 numbers order like their bit patterns. So a histogram of the leading bits says which
bins hold the wanted ranks; everything else is dropped, and the next bits are looked at, until what is
left is small enough to gather and select from. Typical data needs two passes, any data at most five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GATHER_LIMIT = 2**22
"""Values that may be gathered at once (32 MiB of FP64)."""
DIGIT_BITS = 16
"""Bits looked at in one pass."""

Chunks = Callable[[], Iterable[Tensor]]
Integers = NDArray[np.int64]


def quantiles(chunks: Chunks, count: int, levels: Sequence[float]) -> dict[float, float]:
    """The quantiles of `count` non-negative FP64 values, linear between order statistics as in numpy.

    `chunks()` starts a fresh walk over the values; it is called once per pass.
    """
    if count == 0:
        return {level: float("nan") for level in levels}
    low = [int(level * (count - 1)) for level in levels]
    high = [min(rank + 1, count - 1) for rank in low]
    if not levels:
        return {}
    ranks = sorted({*low, *high})
    value = dict(zip(ranks, order_statistics(chunks, count, ranks), strict=True))
    result = {}
    for level, below, above in zip(levels, low, high, strict=True):
        gap = value[above] - value[below]
        result[level] = value[below] + gap * (level * (count - 1) - below)
    return result


def order_statistics(chunks: Chunks, count: int, ranks: Sequence[int]) -> list[float]:
    """The values at the ascending 0-based `ranks` of `count` non-negative FP64 values, exactly."""
    positions: Integers = np.asarray(ranks, dtype=np.int64)  # ranks among the values still kept
    prefixes: Integers = np.zeros(1, dtype=np.int64)  # leading bits of the values still kept
    shift, kept = 63, count
    while kept > GATHER_LIMIT and shift > 0:
        digit = min(DIGIT_BITS, shift)
        shift -= digit
        counts = _histogram(chunks, prefixes, shift, digit)
        ends = counts.cumsum()
        holder = np.searchsorted(ends, positions, side="right")
        bins, slot = np.unique(holder, return_inverse=True)
        starts_after = counts[bins].cumsum() - counts[bins]
        positions = positions - (ends - counts)[holder] + starts_after[slot]
        prefixes = (prefixes[bins >> digit] << digit) | (bins & ((1 << digit) - 1))
        kept = int(counts[bins].sum())
    if shift == 0:  # every bit is known: each bin is one value
        return [float(v) for v in prefixes[slot].view(np.float64)]
    gathered = [_matching(chunk, prefixes, shift)[0].cpu() for chunk in chunks()]
    bits: Integers = torch.cat(gathered).numpy()
    bits.partition(positions)
    return [float(v) for v in bits[positions].view(np.float64)]


def _histogram(chunks: Chunks, prefixes: Integers, shift: int, digit: int) -> Integers:
    """How many of the kept values have each (prefix, next digit)."""
    bins = len(prefixes) << digit
    total: Integers = np.zeros(bins, dtype=np.int64)
    for chunk in chunks():
        bits, slot = _matching(chunk, prefixes, shift + digit)
        key = (slot << digit) | ((bits >> shift) & ((1 << digit) - 1))
        if key.device.type == "cpu":  # numpy: the bins are so many that torch would start threads for them
            total += np.bincount(key.numpy(), minlength=bins)
        else:
            total += torch.bincount(key, minlength=bins).cpu().numpy()
    return total


def _matching(chunk: Tensor, prefixes: Integers, shift: int) -> tuple[Tensor, Tensor]:
    """The bit patterns that begin with one of `prefixes`, and which of them each one begins with."""
    bits = chunk.view(torch.int64)
    if shift == 63:  # no bit known yet: everything matches
        return bits, torch.zeros_like(bits)
    head = bits >> shift
    hit = torch.zeros_like(head, dtype=torch.bool)
    for prefix in prefixes.tolist():  # a few comparisons are faster than a search in a table
        hit |= head == prefix
    table = torch.from_numpy(prefixes).to(chunk.device)
    slot = (head[hit, None] > table).sum(1)
    return bits[hit], slot
