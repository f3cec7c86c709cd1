"""The softmax of the Hopper forward: one block of scores of a consumer's 64 rows."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_fragments import by_row, hidden, largest
from assay.flash.kernels.hopper_shared import ROWS, partial_sums, tanh


class Rows(NamedTuple):
    """What stays the same for 64 rows over all their blocks of keys."""

    first: Any
    """The number of the first one within the sequence."""
    numbers: Any
    """Of all."""
    columns: Any
    """0, 1, …: the keys of a block."""
    slope: Any
    """ALiBi's, in units of log₂."""
    lean: Any
    """ALiBi that leans: what `leaning` is multiplied by."""


@gluon.jit
def masked(s, start, own, work, span, MASK: gl.constexpr):
    """−inf for keys that a row does not see; "left": only those before its window; "right": only those behind it."""
    position = own.numbers + (work.len_k - work.len_q - start)
    if MASK != "left":
        limits = gl.full([ROWS], 0, gl.int32, own.numbers.type.layout) + (work.len_k - 1 - start)
        if span.right is not None:
            limits = gl.minimum(limits, position + span.right)
        s = hidden(s, limits, own.columns, "behind")
    if span.left is not None and MASK != "right":
        s = hidden(s, position - span.left, own.columns, "before")
    return s


@gluon.jit
def softmax(
    s, maximum, row_sum, start, own, ahead, work, span, scores,
    MASK: gl.constexpr, AROUND: gl.constexpr, THREES: gl.constexpr,
):  # fmt: skip
    """One block's scores → P, the new maximum and row sum, and the factor for what came before.

    `THREES`: the maximum as `largest` finds it, which needs scores without a mask.
    With `scores.near` the scores lean within their block (see `hopper_alibi`), and `ahead` is what all of them lack.
    `AROUND`: some keys are ahead of their query, and lean the wrong way.
    """
    LINEAR: gl.constexpr = scores.slopes is None or scores.near is not None
    unit = scores.scale
    if scores.cap is not None:
        s = tanh(s * scores.scale)
        unit = scores.cap
    if not LINEAR:
        position = gl.expand_dims(own.numbers + (work.len_k - work.len_q), 1)
        keys = gl.expand_dims(start + own.columns, 0)
        s = s * unit - own.slope * gl.abs(position.to(gl.float32) - keys.to(gl.float32))
    if AROUND:
        position = gl.expand_dims(own.numbers + (work.len_k - work.len_q - start), 1)
        further = gl.maximum(gl.expand_dims(own.columns, 0) - position, 0).to(gl.float32)
        s -= 2.0 * own.slope / scores.scale * further
    if MASK is not None:
        s = masked(s, start, own, work, span, MASK)
    latest = row_maxima(s, THREES)
    if LINEAR:
        latest = latest * unit
    if scores.near is not None:
        latest += ahead
    latest = gl.maximum(maximum, latest)
    reference = latest
    if MASK is not None:
        reference = gl.where(latest == float("-inf"), 0.0, latest)
    below = gl.expand_dims(reference - ahead if scores.near is not None else reference, 1)
    if LINEAR:
        p = gl.exp2(s * unit - below)
    else:
        p = gl.exp2(s - below)
    factor = gl.exp2(maximum - reference)
    sums = partial_sums(p)
    return p, latest, by_row(row_sum, factor) + sums, factor


@gluon.jit
def row_maxima(s, THREES: gl.constexpr):
    """The largest score of each row."""
    if THREES:
        found = gl.convert_layout(gl.max(largest(s), 1), gl.SliceLayout(1, s.type.layout))
    else:
        found = gl.max(s, 1)
    return found
