"""When and how the Hopper kernels run."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch.utils.weak import WeakTensorKeyDictionary

from assay.flash.call import Call
from assay.flash.descriptors import gluon_fragments, gluon_lines, gluon_tiles
from assay.flash.kernels.hopper_backward import attention_backward_hopper, attention_cast_dq
from assay.flash.kernels.hopper_forward import attention_forward_hopper
from assay.flash.kernels.tile import Scores, Span
from assay.flash.layout import is_aligned, padded
from assay.flash.numerics import SHIPPED

DIMS: tuple[int, ...] = (128, 256)
DIMS_BACKWARD: tuple[int, ...] = (64, 128)
ROWS = 128
"""Of a tile."""
KEYS = 128
"""Of a tile of the backward pass."""
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Q, K, V, dO, the LSE in units of log₂, and delta."""


def takes(call: Call) -> bool:
    """Whether the Hopper kernel can do the call, and is the faster one."""
    return _can(call, DIMS)


def _can(call: Call, dims: tuple[int, ...]) -> bool:
    block = max(map(padded, (call.q.shape[3], call.v.shape[3])))
    return (
        call.q.is_cuda
        and _is_hopper(call.q.device.index)
        and call.q.dtype in (torch.bfloat16, torch.float16)
        and block in dims
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
    dim, value_dim, keys = padded(q.shape[3]), padded(v.shape[3]), columns(call)
    batches, heads = q.shape[:2]
    cu = call.cu_seqlens_q
    blocks = triton.cdiv(q.shape[2], ROWS) + (0 if cu is None else len(cu) - 1)
    places = None if cu is None else _places(cu, blocks)
    attention_forward_hopper[(min(blocks * batches * heads, _processors(q.device.index)),)](
        gluon_tiles(q, 64),
        gluon_tiles(k, keys),
        gluon_tiles(v, keys),
        gluon_tiles(out, 64) if is_aligned(out) else None,
        out,
        out.stride()[:3],
        lse,
        call.sinks,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        places,
        span,
        scores,
        batches,
        heads,
        call.group,
        v.shape[3],
        dim,
        value_dim,
        keys,
        dim <= 128,
        dim <= 128 or value_dim != dim,
        240,
        num_warps=4,
    )


def takes_backward(call: Call) -> bool:
    """Whether the Hopper kernel can do dK and dV of the call, and is the faster one."""
    dims = padded(call.q.shape[3]), padded(call.v.shape[3])
    return _can(call, DIMS_BACKWARD) and dims[0] == dims[1]


def adds_up(call: Call) -> bool:
    """Whether the same kernel does dQ, too: adding it up in memory, in another order every time."""
    same_bits = call.deterministic or call.batch_invariant or torch.are_deterministic_algorithms_enabled()
    return takes_backward(call) and not same_bits


def backward(
    call: Call,
    tensors: Tensors,
    dq_sums: torch.Tensor | None,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    span: Span,
    scores: Scores,
) -> None:
    """Fill `dk` and `dv`; with `dq_sums` also `dq`."""
    q, k, v, dout, log2_lse, delta = tensors
    batches, heads, queries, dim = q.shape
    block, kv_heads, cu = padded(dim), k.shape[1], call.cu_seqlens_k
    blocks = triton.cdiv(k.shape[2], KEYS) + (0 if cu is None else len(cu) - 1)
    room = log2_lse.shape[1]
    attention_backward_hopper[(blocks * batches * kv_heads,)](
        *(gluon_tiles(x, 64) for x in (q, k, v, dout)),
        gluon_lines(log2_lse),
        gluon_lines(delta),
        None if dq_sums is None else gluon_fragments(dq_sums),
        *(gluon_tiles(x, 64) if is_aligned(x) else None for x in (dk, dv)),
        dk,
        dv,
        dk.stride()[:3],
        dv.stride()[:3],
        None if cu is None else _places(cu, blocks),
        span,
        scores,
        abs(call.scale),
        room,
        heads,
        kv_heads,
        call.group,
        dim,
        v.shape[3],
        block,
        dq_sums is not None,
        num_warps=4,
    )
    if dq_sums is not None:
        rows = triton.cdiv(queries, 64) + (0 if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1)
        attention_cast_dq[(rows * (block // 64), heads, batches)](
            dq_sums, dq, dq.stride()[:3], span, call.scale, room, heads, dim, block
        )


_KNOWN = WeakTensorKeyDictionary()


def _places(cu: torch.Tensor, most: int) -> torch.Tensor:
    """Once for all layers of a model; but a captured graph may be replayed with other lengths, so it counts again."""
    if torch.cuda.is_current_stream_capturing() or cu.is_inference():
        return _count_places(cu, most)
    state = cu._version, torch.cuda.current_stream(cu.device)
    known = _KNOWN.get(cu)
    if known is None or known[0] != state:
        known = _KNOWN[cu] = (state, _count_places(cu, most))
    found: torch.Tensor = known[1]
    return found


def _count_places(cu: torch.Tensor, most: int) -> torch.Tensor:
    """Packed: how many blocks of rows there are, then the sequence of each and its number there; no host read."""
    ends = ((cu[1:] - cu[:-1] + (ROWS - 1)) // ROWS).cumsum(0, dtype=torch.int32)
    blocks = torch.arange(most, dtype=torch.int32, device=cu.device)
    sequences = torch.searchsorted(ends, blocks, right=True, out_int32=True).clamp_(max=len(ends) - 1)
    before = torch.cat((ends.new_zeros(1), ends[:-1]))
    return torch.cat((ends[-1:], torch.stack((sequences, blocks - before[sequences]), 1).flatten()))


def columns(call: Call) -> int:
    """Keys of a block: as many as the registers hold."""
    return 128 if max(call.q.shape[3], call.v.shape[3]) <= 128 else 64


@cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9
