"""The softmax of the Hopper forward: one block of scores of a consumer's 64 rows."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_fragments import by_threads, hidden, largest, leaned
from assay.flash.kernels.hopper_shared import ROWS, partial_sums, tanh


@gluon.jit
def masked(s, start, rows, columns, work, span, MASK: gl.constexpr):
    """−inf for keys that a row does not see; "left": only those before its window."""
    position = rows + (work.len_k - work.len_q - start)
    if MASK == "all":
        limits = gl.full([ROWS], 0, gl.int32, rows.type.layout) + (work.len_k - 1 - start)
        if span.right is not None:
            limits = gl.minimum(limits, position + span.right)
        s = hidden(s, limits, columns, "behind")
    if span.left is not None:
        s = hidden(s, position - span.left, columns, "before")
    return s


@gluon.jit
def softmax(
    s, maximum, row_sum, start, rows, columns, slope, lean, work, span, scores,
    MASK: gl.constexpr, THREES: gl.constexpr,
):  # fmt: skip
    """One block's scores → P, the new maximum and row sum, and the factor for what came before.

    `THREES`: the maximum as `largest` finds it, which needs scores without a mask.
    With `scores.near` a key adds `lean` more than the one before it, and all are counted from the tile's first
    position: what that adds to a row's scores `attend` takes off its LSE.
    """
    LINEAR: gl.constexpr = scores.slopes is None or scores.near is not None
    unit = scores.scale
    if scores.cap is not None:
        s = tanh(s * scores.scale)
        unit = scores.cap
    if scores.near is not None:
        s = leaned(s, lean)
    if not LINEAR:
        position = gl.expand_dims(rows + (work.len_k - work.len_q), 1)
        keys = gl.expand_dims(start + columns, 0)
        s = s * unit - slope * gl.abs(position.to(gl.float32) - keys.to(gl.float32))
    if MASK is not None:
        s = masked(s, start, rows, columns, work, span, MASK)
    if scores.near is not None:
        own = largest(s) if THREES else gl.max(gl.max(by_threads(s), 3), 1)
        ahead = ahead_of(own, start, slope, work)
        latest = gl.max(own * unit + ahead, 1)
        latest = gl.maximum(maximum, gl.convert_layout(latest, maximum.type.layout))
    elif LINEAR:
        latest = gl.maximum(maximum, row_maxima(s, THREES) * unit)
    else:
        latest = gl.maximum(maximum, row_maxima(s, THREES))
    reference = latest
    if MASK is not None:
        reference = gl.where(latest == float("-inf"), 0.0, latest)
    if scores.near is not None:
        reference_here = gl.expand_dims(gl.convert_layout(reference, gl.SliceLayout(1, ahead.type.layout)), 1) - ahead
        p = gl.exp2(by_threads(s) * unit - gl.expand_dims(gl.expand_dims(reference_here, 1), 3))
        p = gl.convert_layout(gl.reshape(p, s.shape), s.type.layout)
    elif LINEAR:
        p = gl.exp2(s * unit - gl.expand_dims(reference, 1))
    else:
        p = gl.exp2(s - gl.expand_dims(reference, 1))
    factor = gl.exp2(maximum - reference)
    sums = partial_sums(p)
    row_sum = row_sum * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout)), 1)
    return p, latest, row_sum + sums, factor


@gluon.jit
def row_maxima(s, THREES: gl.constexpr):
    """The largest score of each row."""
    if THREES:
        found = gl.convert_layout(gl.max(largest(s), 1), gl.SliceLayout(1, s.type.layout))
    else:
        found = gl.max(s, 1)
    return found


@gluon.jit
def ahead_of(own, start, slope, work):
    """Near ALiBi: what each thread's `own` scores still lack, which `leaned` counts from the thread's first key."""
    THREADS: gl.constexpr = gl.SliceLayout(0, own.type.layout)
    first = start - (work.first_row + work.len_k - work.len_q) + 2 * gl.arange(0, 4, THREADS)
    return gl.expand_dims(slope * first.to(gl.float32), 0)


@gluon.jit
def lean_of(slope, scores):
    """Near ALiBi: what a key adds to the scores more than the one before it."""
    return slope / (scores.scale if scores.cap is None else scores.cap)
