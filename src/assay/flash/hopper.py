"""When and how the Hopper kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton
from torch.utils.weak import WeakTensorKeyDictionary

from assay.flash.call import Call
from assay.flash.descriptors import gluon_tiles
from assay.flash.kernels.hopper_forward import Shape, attention_forward_hopper
from assay.flash.kernels.tile import Scores, Span
from assay.flash.layout import is_aligned, padded
from assay.flash.numerics import SHIPPED

DIMS: tuple[int, ...] = (64, 128, 256)
SHORT = 512
"""Sequences up to this long are cut into tiles of 128 rows, also at small heads."""
LAZY = 8.0
"""The maximum may grow by this much (log₂) before what came before is rescaled."""


def takes(call: Call) -> bool:
    """Whether the Hopper kernel can do the call, and is the faster one."""
    block = max(map(padded, (call.q.shape[3], call.v.shape[3])))
    return (
        call.q.is_cuda
        and _is_hopper(call.q.device.index)
        and call.q.dtype in (torch.bfloat16, torch.float16)
        and block in DIMS
        and call.bias is None
        and call.dropout == 0
        and call.scaled
        and call.numerics == SHIPPED
    )


def forward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    span: Span,
    scores: Scores,
) -> None:
    """Fill `out` and `lse`."""
    shape = shape_of(call)
    batches, heads = q.shape[:2]
    rows, cu = 64 * shape.consumers, call.cu_seqlens_q
    blocks = triton.cdiv(q.shape[2], rows) + (0 if cu is None else len(cu) - 1)
    places = None if cu is None else _places(cu, rows, blocks)
    attention_forward_hopper[(min(blocks * batches * heads, _processors(q.device.index)),)](
        gluon_tiles(q, 64),
        gluon_tiles(k, shape.columns),
        gluon_tiles(v, shape.columns),
        gluon_tiles(out, 64) if is_aligned(out) else None,
        out,
        out.stride()[:3],
        lse,
        call.sinks,
        _counter(q.device),
        places,
        span,
        scores,
        batches,
        heads,
        call.group,
        padded(q.shape[3]),
        shape,
        160 if shape.consumers == 3 else 240,
        num_warps=4,
    )


def shape_of(call: Call) -> Shape:
    """Small heads leave registers for three consumers, whose tiles need long sequences: no row's bits depend on it."""
    sequences = 1 if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    three = (
        max(call.q.shape[3], call.v.shape[3]) <= 64
        and call.slopes is None  # which takes registers of its own
        and call.q.shape[2] > SHORT * sequences
    )
    return _shape(call.q.shape[3], call.v.shape[3], three)


@cache
def _shape(dim: int, value_dim: int, three: bool) -> Shape:
    own_buffer = padded(dim) <= 128 or padded(value_dim) != padded(dim)
    return Shape(
        consumers=3 if three else 2,
        stages=2,
        q_stages=2 if three else 1,
        columns=128 if max(dim, value_dim) <= 128 else 64,
        value_dim=value_dim,
        block_value_dim=padded(value_dim),
        q_in_registers=dim <= 128 and not three,
        own_buffer=own_buffer,
        turns=three,
        lazy=LAZY,
    )


_COUNTERS: dict[int, tuple[torch.Tensor, Iterator[int]]] = {}
_OF_STREAMS: dict[tuple[int, int], torch.Tensor] = {}
_MOST = 4096


def _counter(device: torch.device) -> torch.Tensor:
    """A 0 that no other kernel has at the same time: the kernel leaves it at 0.

    One a stream, whose kernels run one after the other; one a captured call, as graphs run on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return (
            _new_counter(device.index)
            if device.index in _COUNTERS
            else torch.zeros(1, dtype=torch.int32, device=device)
        )
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    found = _OF_STREAMS.get(key)
    if found is None:
        if device.index not in _COUNTERS:
            zeros = torch.zeros(_MOST, 4, dtype=torch.int32, device=device)  # 16 bytes each
            torch.cuda.current_stream(device).synchronize()  # for the other streams
            _COUNTERS[device.index] = zeros, iter(range(_MOST))
        found = _OF_STREAMS[key] = _new_counter(device.index)
    return found


def _new_counter(index: int) -> torch.Tensor:
    """From a device's store, or zeroed for this call once that is used up."""
    zeros, free = _COUNTERS[index]
    place = next(free, None)
    return zeros.new_zeros(1) if place is None else zeros[place]


_KNOWN = WeakTensorKeyDictionary()


def _places(cu: torch.Tensor, rows: int, most: int) -> torch.Tensor:
    """Once for all layers of a model; but a captured graph may be replayed with other lengths, so it counts again."""
    if torch.cuda.is_current_stream_capturing() or cu.is_inference():
        return _count_places(cu, rows, most)
    state = cu._version, torch.cuda.current_stream(cu.device), rows
    known = _KNOWN.get(cu)
    if known is None or known[0] != state:
        known = _KNOWN[cu] = (state, _count_places(cu, rows, most))
    found: torch.Tensor = known[1]
    return found


def _count_places(cu: torch.Tensor, rows: int, most: int) -> torch.Tensor:
    """Packed: how many blocks of rows there are, then the sequence of each and its number there; no host read."""
    ends = ((cu[1:] - cu[:-1] + (rows - 1)) // rows).cumsum(0, dtype=torch.int32)
    blocks = torch.arange(most, dtype=torch.int32, device=cu.device)
    sequences = torch.searchsorted(ends, blocks, right=True, out_int32=True).clamp_(max=len(ends) - 1)
    before = torch.cat((ends.new_zeros(1), ends[:-1]))
    return torch.cat((ends[-1:], torch.stack((sequences, blocks - before[sequences]), 1).flatten()))


def columns(call: Call) -> int:
    """Keys of a block: as many as the registers hold."""
    return shape_of(call).columns


@cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9
