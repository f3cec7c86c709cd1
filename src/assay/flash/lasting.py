"""Tensors on a GPU that live longer than the call that made them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def lasting(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` makes, in a thread of its own.

    `torch.compile(mode="reduce-overhead")` keeps what a thread allocates while a function warms up in the memory of
    that function's graph, and raises an error if any of it outlives the call.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
