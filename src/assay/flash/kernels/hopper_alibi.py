"""ALiBi on Hopper's tensor cores.

Within a block of keys that are not ahead of their query ("near") a key's bias is slope · column, the same for all rows
and blocks: a product of rank one, which is one more step of Q·Kᵀ. `lean_of` takes Q's place in it and `leaning` that of
K. What a block has in common, `ahead_of`, and what a row has, which its LSE loses, are left to maximum and exponent.
Blocks of keys that are all ahead lean the other way; in the one or two between, what is wrong is taken off.

Backward, scores are (keys, rows), and `lean_of_keys` times `leaning_rows` is slope · (key − row).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from assay.flash.kernels.hopper_shared import ROWS, shared


@gluon.jit
def ahead_of(start, first, slope, work, COLUMNS: gl.constexpr):
    """ALiBi of a block's middle key, counted from the consumer's `first` row: positive for later keys.

    A row counts slope · (row − first) too much, which `attend` takes off its LSE. Not from the tile's first row: tiles
    have two or three consumers.
    """
    return slope * (start + COLUMNS // 2 - (first + work.len_k - work.len_q)).to(gl.float32)


@gluon.jit
def bounded(slope, scores):
    """No more than `lean_of` can hold. That is over 10⁵, which hides all keys but the nearest anyway."""
    largest = scores.scale * (65504.0 * 256)
    return gl.where(slope > largest, largest, gl.where(slope < -largest, -largest, slope))  # NaN stays NaN


@gluon.jit
def lean_of(slope, scores, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """ALiBi's slope in units of Q·Kᵀ, as three 16-bit numbers which together have all its bits, to multiply `leaning`.

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
def turned(lean):
    """With the other sign. In assembly, so that there is no keeping both: registers are few."""
    return gl.inline_asm_elementwise(
        "xor.b32 $0, $1, 0x80008000;", "=r,r", [lean], dtype=lean.dtype, is_pure=True, pack=2
    )


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


@gluon.jit
def lean_of_keys(slope, scores, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """What 64 keys, counted from the middle one, and 64 rows add to the scores, for a product with `leaning_rows`.

    Twice four columns: the number's 2¹⁵th part, the 2⁸th of what that lacks, and what both lack, twice.
    """
    keys = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
    number = slope / scores.scale * gl.where(column < 4, keys - ROWS // 2, -(ROWS // 2)).to(gl.float32)
    large = (number / 32768.0).to(dtype).to(gl.float32)
    number -= large * 32768.0
    small = (number / 256.0).to(dtype).to(gl.float32)
    rest = number - small * 256.0
    return gl.where(column % 4 == 0, large, gl.where(column % 4 == 1, small, rest)).to(dtype)


@gluon.jit
def leaning_rows(dtype: gl.constexpr):
    """(64 rows, 16) in shared memory: what the parts of `lean_of_keys` are parts of; once for the keys, once for the
    rows, of which each has its share by how far it is from the middle one.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
    part = gl.where(column % 4 == 0, 32768.0, gl.where(column % 4 == 1, 256.0, gl.where(column % 4 == 2, 1.0, 0.0)))
    share = (rows - ROWS // 2).to(gl.float32) / (ROWS // 2)
    buffer = shared(dtype, 1, ROWS, 16).index(0)
    buffer.store((part * gl.where(column < 4, 1.0, gl.where(column < 8, share, 0.0))).to(dtype))
    return buffer
