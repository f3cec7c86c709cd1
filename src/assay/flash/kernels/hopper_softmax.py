"""The softmax of the Hopper forward: one block of scores of a consumer's 64 rows."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_fragments import hidden, largest
from assay.flash.kernels.hopper_shared import ROWS, partial_sums, shared, tanh


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
    s, maximum, row_sum, start, rows, columns, slope, ahead, work, span, scores,
    MASK: gl.constexpr, THREES: gl.constexpr,
):  # fmt: skip
    """One block's scores → P, the new maximum and row sum, and the factor for what came before.

    `THREES`: the maximum as `largest` finds it, which needs scores without a mask.
    With `scores.near` the scores lean within their block (see `leaning`), and `ahead` is what all of them lack.
    """
    LINEAR: gl.constexpr = scores.slopes is None or scores.near is not None
    unit = scores.scale
    if scores.cap is not None:
        s = tanh(s * scores.scale)
        unit = scores.cap
    if not LINEAR:
        position = gl.expand_dims(rows + (work.len_k - work.len_q), 1)
        keys = gl.expand_dims(start + columns, 0)
        s = s * unit - slope * gl.abs(position.to(gl.float32) - keys.to(gl.float32))
    if MASK is not None:
        s = masked(s, start, rows, columns, work, span, MASK)
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
def ahead_of(start, slope, work, COLUMNS: gl.constexpr):
    """Near ALiBi: what a block's middle key has more than the tile's first position.

    All are counted from there: what that adds to a row's scores `attend` takes off its LSE.
    """
    return slope * (start + COLUMNS // 2 - (work.first_row + work.len_k - work.len_q)).to(gl.float32)


@gluon.jit
def bounded(slope, scores):
    """Near ALiBi: no more than `lean_of` can hold. That is over 10⁵, which hides all keys but the nearest anyway."""
    largest = scores.scale * (65504.0 * 256)
    return gl.where(slope > largest, largest, gl.where(slope < -largest, -largest, slope))  # and NaN


@gluon.jit
def lean_of(slope, scores, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Near ALiBi: what a key adds to the scores more than the one before it, to 22 bits, for a product with `leaning`.

    16 columns, the same in all rows: the number's 256th part, what that lacks, what both lack, and 0.
    """
    lean = slope / scores.scale
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    column = gl.arange(0, 16, COLUMNS)
    large = (lean / 256.0).to(dtype).to(gl.float32)
    small = (lean - large * 256.0).to(dtype).to(gl.float32)
    rest = lean - large * 256.0 - small
    parts = gl.where(column == 0, large, gl.where(column == 1, small, gl.where(column == 2, rest, 0.0)))
    return (gl.full([ROWS, 16], 0.0, gl.float32, LAYOUT) + gl.expand_dims(parts, 0)).to(dtype)


@gluon.jit
def leaning(dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """(keys of a block, 16) in shared memory: how far each is from the middle one; first its 256-fold.

    From there, and as the last step: the tensor cores cut a sum off at the bits of its largest part.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    keys = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
    buffer = shared(dtype, 1, COLUMNS, 16).index(0)
    buffer.store(((keys - COLUMNS // 2) * gl.where(column == 0, 256, 1)).to(dtype))
    return buffer
