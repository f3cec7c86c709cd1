"""Sorting on the CPU: numpy's SIMD sort or torch's integer radix sort, whichever is faster on this machine.

numpy's is the faster one on most machines (0.06 s for 1e7 floats with AVX2) and needs no memory beside the copy;
but with AVX-512 on AMD's Zen 4 it takes 0.42 s, where the radix sort takes 0.2 s on two threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WORTH_ASKING = 2**22
"""Elements from which on the faster sort is looked for; below, numpy's."""
WORTH_A_THREAD = 2**20
"""Elements from which on two sorts at once are faster than two in a row: a thread costs 0.1 ms and more to start."""
_TRIAL = 2**20


def sort_pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The values of two flat FP32 or FP64 tensors without NaN, ascending; large ones at the same time.

    The second thread has nothing to do until it is known to the pool, which then waits for it. Ctrl-C while it starts
    would leave it behind, and a thread that comes back from torch into a Python that is ending aborts the process.
    """
    if min(len(a), len(b)) < WORTH_A_THREAD:
        return sort_copy(a), sort_copy(b)
    sort_a, sort_b = _sort_for(a), _sort_for(b)  # chosen before the thread starts, which would disturb the trial
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        second = pool.submit(sort_b, b)  # numpy frees the GIL, and so does torch
        return sort_a(a), second.result()


def sort_copy(x: Tensor) -> Tensor:
    """The same of one tensor, in this thread."""
    return _sort_for(x)(x)


def _sort_for(x: Tensor) -> Callable[[Tensor], Tensor]:
    large = x.dtype == torch.float32 and x.numel() >= WORTH_ASKING
    return radix_sort if large and _radix_beats_numpy() else numpy_sort


def numpy_sort(x: Tensor) -> Tensor:
    """Sort a copy, in one thread."""
    return torch.from_numpy(np.sort(x.resolve_neg().numpy()))


def radix_sort(x: Tensor) -> Tensor:
    """Sort FP32 values through integers that are ordered alike; torch sorts integers by radix, in all its threads."""
    bits = x.resolve_neg().contiguous().view(torch.int32)
    ordered = torch.sort(_flip_negatives(bits)).values
    return _flip_negatives(ordered).view(torch.float32)


def _flip_negatives(bits: Tensor) -> Tensor:
    """All but the sign bit of negative numbers inverted: their order is that of the floats. Its own inverse."""
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


@lru_cache(maxsize=1)
def _radix_beats_numpy() -> bool:
    """One trial of each, once a process: about 50 ms. Both give the same values, so nothing but time depends on it."""
    x = torch.randn(_TRIAL, generator=torch.Generator().manual_seed(0))
    radix_sort(x)  # threads start
    start = time.perf_counter()
    radix_sort(x)
    middle = time.perf_counter()
    x.numpy().sort()
    # Tensors come in pairs: two sorts at once slow the radix sort, which has threads of its own, but not numpy's.
    return 1.7 * (middle - start) < time.perf_counter() - middle
