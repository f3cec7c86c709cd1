"""The golden value of an attention call: in FP64, by fused kernels where they are faster, else in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from assay.watching.kernels import fused_in_double
from assay.watching.plain import plain
from assay.watching.scores import HIDDEN, Scores

if TYPE_CHECKING:
    from assay.watching.call import AttentionCall

_FEW, _WIDE = 64, 128
"""Queries that fill a tile of the kernels; with fewer, as in decoding, they would mostly multiply nothing. And the
widest head dimension that a tile of FP64 fits on the chip with."""


def exact(call: AttentionCall, grad: Tensor | None, scores: Scores) -> tuple[Tensor, ...]:
    """The output and, given its gradient, those of q, k and v; what the scores are like is told to `scores`."""
    queries, dim = call.q.shape[2:]
    if not fused_in_double(call.q) or queries < _FEW or max(dim, call.v.shape[3]) > _WIDE:
        return plain(call.in_double(), grad, scores)
    from assay.watching import triton_golden

    found, rows = triton_golden.golden(call, grad, HIDDEN)
    scores.add(rows)
    return found
