"""Counters in device memory from which the CTAs of a kernel take their tiles: see `kernels/hopper_queue.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from assay.flash.lasting import lasting

_COUNTERS: dict[int, tuple[torch.Tensor, Iterator[int]]] = {}
_OF_STREAMS: dict[tuple[int, int], torch.Tensor] = {}
_MOST = 4096


def counter(device: torch.device) -> torch.Tensor:
    """A 0 that no other kernel has at the same time: the kernel leaves it at 0.

    One a stream, whose kernels run one after the other; one a captured call, as graphs run on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return (
            _new_counter(device.index)
            if device.index in _COUNTERS
            else torch.zeros(1, dtype=torch.int32, device=device)
        )
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)  # as Triton asks: no Stream is made
    found = _OF_STREAMS.get(key)
    if found is None:
        if device.index not in _COUNTERS:
            _COUNTERS[device.index] = lasting(partial(_zeros, device)), iter(range(_MOST))
        found = _OF_STREAMS[key] = _new_counter(device.index)
    return found


def _zeros(device: torch.device) -> torch.Tensor:
    """16 bytes for each counter."""
    zeros = torch.zeros(_MOST, 4, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # for the other streams
    return zeros


def _new_counter(index: int) -> torch.Tensor:
    """From a device's store, or zeroed for this call once that is used up."""
    zeros, free = _COUNTERS[index]
    place = next(free, None)
    return zeros.new_zeros(1) if place is None else zeros[place]
