"""When and how the Hopper kernels run."""

from __future__ import annotations

import math

import torch

from assay.flash import gpu, replay
from assay.flash.call import Call
from assay.flash.counters import counter
from assay.flash.descriptors import gluon_fragments, gluon_lines, gluon_tiles
from assay.flash.kernels.backward import attention_cast_dq
from assay.flash.kernels.hopper_backward import attention_backward_hopper
from assay.flash.kernels.hopper_backward_large import attention_backward_large_hopper
from assay.flash.kernels.hopper_backward_q import attention_backward_q_hopper
from assay.flash.kernels.tile import Scores, Span
from assay.flash.layout import is_aligned, padded
from assay.flash.numerics import SHIPPED
from assay.flash.places import places

DIMS: tuple[int, ...] = (64, 128, 256)
TILE_ROWS = 128
KEYS, KEYS_LARGE = 128, 64
"""Of a tile of the backward pass; of `backward_kv_large`."""
BUSY, CACHED = 0.9, 512 * 64
"""`alone`: the least share of the processors that whole heads must keep busy, and the most numbers of Q of one KV head
whose sums of dQ stay in the cache."""
FEW = 8
"""`together`: with fewer tiles than this for each processor, their order matters."""
SHORT = {64: 0, 128: 1024}
"""Up to so many keys, packed ones in the mean, dQ by rows is faster than added up: its sums, in FP32, are filled, added
to and read, which takes longer than to compute S and dP once more."""
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Q, K, V, dO, the LSE in units of log₂, and delta."""


def can(call: Call) -> bool:
    """Whether the Hopper kernels do what the call asks for."""
    block = max(map(padded, (call.q.shape[3], call.v.shape[3])))
    return (
        call.q.is_cuda
        and gpu.takes_hopper_kernels(call.q.device.index)
        and call.q.dtype in (torch.bfloat16, torch.float16)
        and block in DIMS
        and call.bias is None
        and call.dropout == 0
        and call.scaled
        and call.numerics == SHIPPED
    )


def leans(call: Call) -> bool:
    """Whether ALiBi is a step of the backward's Q·Kᵀ, which saves nothing where keys are ahead (see `_leans`)."""
    return call.near and call.right == 0 and call.softcap is None and abs(call.scale) > 0.01


def takes_backward(call: Call) -> bool:
    """Whether the Hopper kernel can do dK and dV of the call."""
    dims = padded(call.q.shape[3]), padded(call.v.shape[3])
    return can(call) and dims[0] == dims[1] <= 128


def adds_up(call: Call) -> bool:
    """Whether the same kernel does dQ, too: adding it up in memory, unless `alone` in another order every time."""
    if not takes_backward(call) or call.batch_invariant:
        return False
    short = call.k.shape[2] <= SHORT[padded(call.q.shape[3])] * call.sequences
    same_bits = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return alone(call) or not (short or same_bits)


def alone(call: Call) -> bool:
    """Whether one CTA takes all keys of a head: where heads keep the processors busy, and stay in the cache."""
    keys, heads = call.k.shape[2], call.k.shape[0] * call.k.shape[1]
    if call.packed:
        return False
    if keys <= KEYS:
        return True
    waves = heads / gpu.processors(call.q.device.index)
    return waves / math.ceil(waves) >= BUSY and call.group * call.q.shape[2] * padded(call.q.shape[3]) <= CACHED


def overwrites(call: Call) -> bool:
    """Whether sums of dQ need not be 0 before: `alone`, and all rows see a head's first tile of keys."""
    keys, behind = call.k.shape[2], call.k.shape[2] - call.q.shape[2]
    first = call.right is None or behind + call.right >= 0
    return alone(call) and first and (call.left is None or keys - call.left <= min(keys, KEYS))


def together(call: Call) -> int:
    """Heads of K whose tiles go together, the long ones first.

    Head by head; but where a mask makes tiles unequal and there are FEW for each processor, the long ones of the last
    head would begin when others end: as many heads, then, as have two for each. Odd: Triton compiles one form.
    """
    blocks, slots = -(-call.k.shape[2] // KEYS), gpu.processors(call.q.device.index)
    few = call.k.shape[0] * call.k.shape[1] * blocks < FEW * slots
    if not few or alone(call) or not call.masked:
        return 1
    return -(-2 * slots // blocks) | 1


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
    (batches, heads), dim = q.shape[:2], q.shape[3]
    block, kv_heads, blocks = padded(dim), k.shape[1], call.tiles("k", KEYS)
    room = log2_lse.shape[1]
    if block == 64 and call.softcap is None and not leans(call):
        scores = scores._replace(near=None)
    works = batches * kv_heads * (1 if dq_sums is not None and alone(call) else blocks)
    replay.launch(
        attention_backward_hopper,
        (min(works, gpu.processors(q.device.index)),),
        *(gluon_tiles(x, 64) for x in (q, k, v, dout)),
        gluon_lines(log2_lse),
        gluon_lines(delta),
        None if dq_sums is None else gluon_fragments(dq_sums),
        *(gluon_tiles(x, 64) if is_aligned(x) else None for x in (dk, dv)),
        dk,
        dv,
        dk.stride()[:3],
        dv.stride()[:3],
        counter(q.device),
        places(call, "k", blocks, KEYS),
        span,
        scores,
        abs(call.scale),
        room,
        batches,
        heads,
        kv_heads,
        call.group,
        together(call),
        DIM=dim,
        VALUE_DIM=v.shape[3],
        BLOCK_DIM=block,
        ADD_Q=dq_sums is not None,
        ALONE=dq_sums is not None and alone(call),
        FRESH=dq_sums is not None and overwrites(call),
        num_warps=4,
    )
    if dq_sums is not None:
        blocks = call.tiles("q", TILE_ROWS)
        replay.launch(
            attention_cast_dq, (blocks * 2 * (block // 64), heads, batches),
            dq_sums, dq, dq.stride()[:3], places(call, "q", blocks, TILE_ROWS), span, call.scale, room,
            heads, DIM=dim, BLOCK_DIM=block,
        )  # fmt: skip


def backward_q(call: Call, tensors: Tensors, dq: torch.Tensor, span: Span, scores: Scores) -> None:
    """Fill `dq`."""
    q, k, v, dout, log2_lse, delta = tensors
    keys = columns(call)
    batches, heads = q.shape[:2]
    blocks = call.tiles("q", TILE_ROWS)
    replay.launch(
        attention_backward_q_hopper,
        (min(blocks * batches * heads, gpu.processors(q.device.index)),),
        gluon_tiles(q, 64),
        gluon_tiles(dout, 64),
        gluon_tiles(k, keys),
        gluon_tiles(v, keys),
        gluon_tiles(dq, 64) if is_aligned(dq) else None,
        dq,
        dq.stride()[:3],
        log2_lse,
        delta,
        log2_lse.shape[1],
        call.scale,
        counter(q.device),
        places(call, "q", blocks, TILE_ROWS),
        span,
        scores,
        batches,
        heads,
        call.group,
        DIM=q.shape[3],
        BLOCK_DIM=padded(q.shape[3]),
        BLOCK_VALUE_DIM=padded(v.shape[3]),
        num_warps=4,
    )


def takes_backward_kv_large(call: Call) -> bool:
    """Whether `backward_kv_large` can do the call."""
    return can(call) and padded(call.q.shape[3]) == padded(call.v.shape[3]) == 256


def backward_kv_large(
    call: Call, tensors: Tensors, dk: torch.Tensor, dv: torch.Tensor, span: Span, scores: Scores
) -> None:
    """Fill `dk` and `dv`."""
    q, k, v, dout, log2_lse, delta = tensors
    batches, kv_heads = k.shape[:2]
    blocks = call.tiles("k", KEYS_LARGE)
    replay.launch(
        attention_backward_large_hopper,
        (min(blocks * batches * kv_heads, gpu.processors(q.device.index)),),
        gluon_tiles(q, 64),
        gluon_tiles(dout, 64),
        gluon_tiles(k, KEYS_LARGE),
        gluon_tiles(v, KEYS_LARGE),
        gluon_lines(log2_lse),
        gluon_lines(delta),
        gluon_tiles(dk, KEYS_LARGE) if is_aligned(dk) else None,
        gluon_tiles(dv, KEYS_LARGE) if is_aligned(dv) else None,
        dk,
        dv,
        dk.stride()[:3],
        dv.stride()[:3],
        log2_lse.shape[1],
        abs(call.scale),
        counter(q.device),
        places(call, "k", blocks, KEYS_LARGE),
        span,
        scores,
        batches,
        kv_heads,
        call.group,
        DIM=k.shape[3],
        VALUE_DIM=v.shape[3],
        BLOCK_DIM=padded(k.shape[3]),
        num_warps=4,
    )


def columns(call: Call) -> int:
    """Keys of a block: as many as the registers hold."""
    return 128 if max(call.q.shape[3], call.v.shape[3]) <= 128 else 64
