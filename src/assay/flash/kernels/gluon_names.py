"""What Gluon calls differently in Triton 3.6, 3.7, 3.8 and 3.9, under one name each."""

from __future__ import annotations

from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first(owner: Any, *names: str) -> Any:
    """What it has under the first of these names; None in a Triton of which `gpu` wants no Hopper kernels."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


copy_in = _first(tma, "async_load", "async_copy_global_to_shared")
"""The copy engine fetches a tile into shared memory and tells a barrier how much came."""
copy_out = _first(tma, "async_store", "async_copy_shared_to_global")
"""It writes a tile of shared memory out; waited for by `tma.store_wait`."""
thread_barrier = _first(gl, "barrier", "thread_barrier")
"""The threads of a partition wait for each other."""
reinterpret = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
"""Shared memory, seen as of another dtype, shape and layout."""
