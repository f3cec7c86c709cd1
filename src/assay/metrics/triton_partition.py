"""Partition a tensor by value into contiguous buckets, in two passes over it.

The first pass counts: how many elements of each block fall into each bucket. The running sum of these
counts, bucket by bucket, is where each block must write. The second pass writes. No atomics: the order
is that of the input within each bucket, the same on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements per program; fewer than 2^15, so that a count fits in 16 bits."""


@triton.jit  # type: ignore[untyped-decorator]
def _bucket_of(x: tl.tensor, pivots: tl.tensor, BUCKETS: tl.constexpr) -> tl.tensor:
    """How many pivots are not above x."""
    bucket = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(BUCKETS - 1):
        bucket += (x >= tl.load(pivots + k)).to(tl.int32)
    return bucket


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(
    values: tl.tensor,
    pivots: tl.tensor,
    counts: tl.tensor,
    n: int,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """counts[k, block] = elements of the block in bucket k."""
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # 64 bits: n may exceed 2^31
    inside = at < n
    x = tl.load(values + at, mask=inside, other=0.0)
    bucket = _bucket_of(x, pivots, BUCKETS)
    for k in tl.static_range(BUCKETS):
        here = (inside & (bucket == k)).to(tl.int32)
        tl.store(counts + k * tl.num_programs(0) + block, tl.sum(here))


@triton.jit  # type: ignore[untyped-decorator]
def _scatter_kernel(
    values: tl.tensor,
    pivots: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    n: int,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write each element of the block behind the block's earlier elements of its bucket."""
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(values + at, mask=inside, other=0.0)
    bucket = _bucket_of(x, pivots, BUCKETS)
    # One running sum counts four buckets at once, each in 16 bits of its own.
    shift = ((bucket % 4) * 16).to(tl.int64)
    one = tl.full([BLOCK], 1, tl.int64) << shift
    rank = tl.zeros([BLOCK], tl.int64)
    for group in tl.static_range((BUCKETS + 3) // 4):
        mine = inside & (bucket // 4 == group)
        running = tl.cumsum(tl.where(mine, one, 0))
        rank += tl.where(mine, (running >> shift) & 0xFFFF, 0)
    start = tl.load(starts + bucket * tl.num_programs(0) + block, mask=inside, other=0)
    tl.store(out + start + rank - 1, x, mask=inside)


def partition(x: Tensor, pivots: Tensor) -> list[Tensor]:
    """The buckets of the flat tensor `x`, ascending: slices of one new tensor of its size.

    Bucket k holds pivots[k-1] <= x < pivots[k]; `x` must hold no NaN and `pivots` must ascend.
    """
    x, pivots = x.contiguous(), pivots.contiguous()
    buckets, blocks = len(pivots) + 1, triton.cdiv(x.numel(), BLOCK)
    counts = torch.empty((buckets, blocks), dtype=torch.int64, device=x.device)
    out = torch.empty_like(x)
    # Triton launches on the current device, which need not be x's. For a CPU tensor this does nothing.
    with torch.cuda.device_of(x):
        _count_kernel[(blocks,)](x, pivots, counts, x.numel(), buckets, BLOCK, enable_fp_fusion=True)
        ends = counts.view(-1).cumsum(0)
        _scatter_kernel[(blocks,)](
            x, pivots, ends - counts.view(-1), out, x.numel(), buckets, BLOCK, enable_fp_fusion=True
        )
    sizes = counts.sum(1).tolist()
    return list(torch.split(out, sizes))
