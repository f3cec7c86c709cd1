"""The golden value of an attention call: in FP64, by fused kernels where they are faster, else in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from assay.watching.adjusting import unexpanded
from assay.watching.kernels import fused_in_double
from assay.watching.plain import plain
from assay.watching.scores import HIDDEN, Scores

if TYPE_CHECKING:
    from assay.watching.call import AttentionCall

_FEW = 64
"""Queries that fill a tile of the kernels; with fewer, as in decoding, they would mostly multiply nothing."""
_WIDE = 128
"""The widest head dimension of which tiles of FP64 fit on the chip."""
_MASK = 1 << 27
"""Elements of a mask at most: the kernels need all of it in FP64."""


def exact(call: AttentionCall, grad: Tensor | None, scores: Scores) -> tuple[Tensor, ...]:
    """The output and, given its gradient, those of q, k and v; what the scores are like is told to `scores`."""
    if not fused_in_double(call.q) or not _fits(call):
        return plain(call.in_double(), grad, scores)
    from assay.watching import triton_golden

    found, rows = triton_golden.golden(call, grad, HIDDEN)
    scores.add(rows)
    return found


def _fits(call: AttentionCall) -> bool:
    """Whether it is of a size that the kernels are for."""
    small = call.bias is None or unexpanded(call.bias).numel() <= _MASK
    return small and call.q.shape[2] >= _FEW and max(call.q.shape[3], call.v.shape[3]) <= _WIDE
