"""When and how the Hopper forward of two or three consumers runs (`kernels/hopper_forward.py`)."""

from __future__ import annotations

from functools import cache

import torch
import triton

from assay.flash import gpu, hopper, replay
from assay.flash.call import Call
from assay.flash.counters import counter
from assay.flash.descriptors import gluon_tiles
from assay.flash.kernels.hopper_forward import Shape, attention_forward_hopper
from assay.flash.kernels.tile import Scores, Span
from assay.flash.layout import is_aligned, padded
from assay.flash.places import places

HEADS, CACHE = 4, 16 << 20
"""At least so many go together; bytes of K and V that stay in the L2 cache."""
SHORT = 1024
"""Up to this long, packed in the mean, masked sequences are cut into tiles of 128 rows, also at small heads; windows,
up to this wide."""


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
    rows = 64 * shape.consumers
    blocks = call.tiles("q", rows)
    replay.launch(
        attention_forward_hopper,
        (min(blocks * batches * heads, gpu.processors(q.device.index)),),
        gluon_tiles(q, 64),
        gluon_tiles(k, shape.columns),
        gluon_tiles(v, shape.columns),
        gluon_tiles(out, 64, shape.out_columns) if is_aligned(out) else None,
        out,
        out.stride()[:3],
        lse,
        call.sinks,
        counter(q.device),
        places(call, "q", blocks, rows),
        span,
        scores._replace(near=triton.language.constexpr(True) if _leans(call) else None),
        batches,
        heads,
        call.group,
        together(call, shape),
        BLOCK_DIM=padded(q.shape[3]),
        SHAPE=shape,
        num_warps=4,
    )


def together(call: Call, shape: Shape) -> int:
    """Heads whose tiles go together, the long ones first.

    Where a mask makes tiles unequal, CTAs end at the same time if many short ones come last: as many heads, then, as
    have two of those for each processor, and K and V that stay in the cache. A power of 2, as numbers of heads mostly
    are: a last group of few would end with long ones. For three consumers it gains nothing.
    """
    if not call.masked or shape.consumers == 3:
        return HEADS
    keys = call.k.shape[2] // call.sequences
    if call.left is not None and call.right is not None:
        keys = min(keys, call.left + call.right + 1)
    keys = max(keys, 1)
    size = keys * (padded(call.q.shape[3]) + padded(call.v.shape[3])) * call.q.element_size()
    two_each = 2 * gpu.processors(call.q.device.index) // -(-keys // (64 * shape.consumers))
    return 1 << max(HEADS, min(two_each, CACHE * call.group // size)).bit_length() - 1


def shape_of(call: Call) -> Shape:
    """Small heads leave registers for three consumers: faster but where masked rows see few keys. No bit depends on it.

    ALiBi that is not a product takes registers of its own.
    """
    small = max(call.q.shape[3], call.v.shape[3]) <= 64
    three = small and (call.slopes is None or _leans(call)) and not _few_keys(call)
    around = _leans(call) and call.right != 0
    return _shape(call.q.shape[3], call.v.shape[3], hopper.columns(call), three, _wide(call), around)


def _leans(call: Call) -> bool:
    """Whether ALiBi can be a step of Q·Kᵀ: a softcap would come in between, and a small scale go past FP16."""
    return call.slopes is not None and call.softcap is None and abs(call.scale) > 0.01


def _few_keys(call: Call) -> bool:
    """Whether a mask leaves a row few."""
    if not call.masked:
        return False
    window = call.left is not None and call.right is not None and call.left + call.right < SHORT
    return window or call.q.shape[2] <= SHORT * call.sequences


def _wide(call: Call) -> bool:
    """Whether no block of 128 keys has both ends of the windows of 64 rows, or the first one and the last key."""
    return call.left is None or call.left + min(call.right or 0, 0) >= 128 + 64


@cache
def _shape(dim: int, value_dim: int, columns: int, three: bool, wide: bool, around: bool) -> Shape:
    return Shape(
        consumers=3 if three else 2,
        columns=columns,
        value_dim=value_dim,
        block_value_dim=padded(value_dim),
        q_in_registers=dim <= 128 and not three,
        out_columns=min(padded(value_dim), 128),
        turns=three,
        stages=4 if max(dim, value_dim) <= 64 and not three else 2,
        ends="right" if wide else "all",
        around=around,
    )
