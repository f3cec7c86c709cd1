"""A call as a CUDA graph: for short calls, the time of the kernels without that of launching them from Python."""

from __future__ import annotations

from contextlib import suppress

import torch

from assay.bench.timing import Work

_FAILED: list[torch.cuda.CUDAGraph] = []
"""Kept, as torch's allocators go on asking them."""


def graph_of(work: Work, calls: int) -> Work:
    """Replays so many calls of `work` with one launch. Raises what the capture raises where it cannot be captured."""
    here = torch.cuda.current_stream()
    # torch leaves its capture stream current if the capture fails; this puts the old one back.
    with torch.cuda.stream(here):
        side = torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):  # libraries allocate their workspaces on first use, which no graph may do
            work()
        here.wait_stream(side)
        return _captured(work, calls)


def _captured(work: Work, calls: int) -> Work:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(calls):
                work()
    except Exception:
        _FAILED.append(graph)
        # After a capture that CUDA broke off, torch's allocator believes it still goes on, and would refuse to empty
        # its cache from then on.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    return graph.replay
