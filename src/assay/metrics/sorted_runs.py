"""A tensor's values in ascending order, as a sequence of sorted runs.

On the CPU there is one run (see `cpu_sort`). On an accelerator torch.sort also moves 64-bit indices and
needs about 32 bytes of workspace per FP32 element. So a large tensor is first partitioned by value into
buckets, and the buckets are sorted one after the other: the workspace is then that of one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

from assay.metrics.cpu_sort import sort_copy

SINGLE_SORT_LIMIT = 2**23
"""Elements an accelerator sorts at once (about 256 MiB of workspace)."""
BUCKETS = 8
"""Into how many buckets a larger tensor is cut: the workspace becomes about the tensor's own size."""
BUCKET_LIMIT = 2**27
"""Elements a bucket should not exceed; more buckets are made instead."""
SAMPLE = 2**20
"""Elements drawn to place the pivots: bucket sizes then vary by less than one percent."""

Partition = Callable[[Tensor, Tensor], Iterable[Tensor]]


def sorted_runs(x: Tensor) -> Iterator[Tensor]:
    """The values of a flat FP32 or FP64 tensor without NaN, ascending, in pieces that follow each other.

    `x` itself is left as it is. Nothing is computed before the first run is asked for.
    """
    if x.device.type == "cpu":
        yield sort_copy(x)
    else:
        yield from bucketed_runs(x, _partition_for(x.device))


def sorted_values(x: Tensor) -> Tensor:
    """The same as one tensor."""
    if x.device.type == "cpu":
        return sort_copy(x)
    runs = list(sorted_runs(x))
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def bucketed_runs(x: Tensor, partition: Partition) -> Iterator[Tensor]:
    """Sorted runs of `x` by way of buckets, on any device."""
    if x.numel() <= SINGLE_SORT_LIMIT:
        yield torch.sort(x).values
        return
    for bucket in partition(x, choose_pivots(x)):
        if bucket.numel() == 0:
            continue
        low, high = torch.aminmax(bucket)
        if bool(low == high):  # one value, however often: nothing to sort
            yield bucket
        elif bucket.numel() > 2 * max(SINGLE_SORT_LIMIT, x.numel() // BUCKETS):
            yield from bucketed_runs(bucket, partition)  # the sample misjudged it: cut again
        else:
            yield torch.sort(bucket).values


def choose_pivots(x: Tensor) -> Tensor:
    """Ascending, distinct values that cut `x` into buckets of about equal size.

    A value frequent enough to be drawn as two pivots (the zeros of a sparse tensor) gets a bucket of
    its own: the second pivot becomes the next larger number. That bucket needs no sorting, and every
    partition of values that are not all equal makes progress.
    """
    buckets = max(BUCKETS, -(-x.numel() // BUCKET_LIMIT))
    # A private generator: the same tensor gets the same pivots, and the user's random state is untouched.
    generator = torch.Generator(x.device).manual_seed(0)
    size = min(SAMPLE, x.numel())
    drawn = torch.randint(x.numel(), (size,), generator=generator, device=x.device)
    sample = torch.sort(x[drawn]).values
    ranks = torch.arange(1, buckets, device=x.device) * size // buckets
    pivots, times = torch.unique_consecutive(sample[ranks], return_counts=True)
    frequent = pivots[times > 1]
    after = torch.nextafter(frequent, torch.full_like(frequent, torch.inf))
    # unique sorts; the next larger number may itself have been drawn
    distinct: Tensor = torch.unique(torch.cat([pivots, after]))
    return distinct


def partition_by_masks(x: Tensor, pivots: Tensor) -> Iterator[Tensor]:
    """The buckets of `x` in ascending order, each selected from the whole: plain torch, any device.

    Bucket k holds pivots[k-1] <= x < pivots[k]; the outer two are open-ended.
    """
    edges = pivots.tolist()
    yield x[x < edges[0]]
    for low, high in pairwise(edges):
        yield x[(x >= low) & (x < high)]
    yield x[x >= edges[-1]]


def _partition_for(device: torch.device) -> Partition:
    """The Triton kernel where there is one, else masks: the same buckets in the same order."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from assay.metrics.triton_partition import partition

        return partition
    return partition_by_masks
