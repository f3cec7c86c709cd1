"""What forward and backward share: which keys a row sees, the scores of one tile, dropout.

Scores are in units of log₂, so that exp2 gives P. A query's position is its row plus (keys − queries): the last query
stands beside the last key.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Span(NamedTuple):
    """Which rows and keys there are, and which keys a row sees. None switches a thing off at compile time."""

    queries: Any
    """Dense: of every sequence."""
    keys: Any
    left: Any
    """Keys up to this far before the query's position."""
    right: Any
    """Keys up to this far after it."""
    cu_q: Any = None
    """Packed: (sequences + 1,) where the rows of each begin."""
    cu_k: Any = None
    sequences: Any = None
    """Packed: how many."""


class Scores(NamedTuple):
    """What becomes of Q·Kᵀ. None switches a thing off at compile time."""

    scale: Any
    """To units of log₂; before a softcap: to units of the cap."""
    cap: Any
    """The softcap, in units of log₂."""
    slopes: Any = None
    """(B, H) FP32, of ALiBi."""
    near: Any = None
    """ALiBi alone, where it leans: it is slope · key within a block (−slope · key if all are ahead), plus
    what all keys of a block and of a row have in common, which maximum and LSE take up."""
    bias: Any = None
    """Float (added) or bool as uint8 (0 hides)."""
    bias_batch: Any = None
    """Its strides. Not a tuple: in a nested one Triton 3.6 loses a stride of 1, which is a compile-time value."""
    bias_head: Any = None
    bias_row: Any = None
    bias_key: Any = None


class Dropout(NamedTuple):
    """None in place of `seed` switches it off."""

    seed: Any
    """One int64."""
    threshold: Any
    """A random 32-bit word below this drops the element."""
    inverse: Any
    """1 / (1 − share dropped)."""


def precision(dtype: torch.dtype, tf32: bool = False) -> str:
    """Of FP32 products, and of the softcap's tanh; the interpreter has no fast one."""
    exact = dtype == torch.float32 and not tf32
    return "ieee" if exact or triton.knobs.runtime.interpret else "tf32"


@triton.jit
def place_of(
    cu: tl.tensor, sequences: tl.tensor, tile: tl.tensor, SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Packed: the sequence that the tile-th tile of SIZE rows belongs to, its number there, and how many there are.

    Beyond the last tile the sequence is `sequences`.
    """
    found = tl.full((), 0, tl.int32)
    earlier = tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int32)
    own = tl.full((), 0, tl.int32)
    for first in range(0, sequences, 128):
        i = first + tl.arange(0, 128)
        there = i < sequences
        tiles = tl.load(cu + i + 1, mask=there, other=0) - tl.load(cu + i, mask=there, other=0)
        tiles = (tiles + SIZE - 1) // SIZE
        last = seen + tl.cumsum(tiles, 0)
        before = there & (last <= tile)
        found += tl.sum(before.to(tl.int32), 0)
        earlier += tl.sum(tl.where(before, tiles, 0), 0)
        own += tl.sum(tl.where(there & (last > tile) & (last - tiles <= tile), tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return found, tile - earlier, own


@triton.jit
def bounds(span: tl.tuple, batch: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """First row, first key, rows and keys of a sequence."""
    if span.cu_q is None:
        return 0, 0, span.queries, span.keys
    else:
        first_row, first_key = tl.load(span.cu_q + batch), tl.load(span.cu_k + batch)
        return (
            first_row,
            first_key,
            tl.load(span.cu_q + batch + 1) - first_row,
            tl.load(span.cu_k + batch + 1) - first_key,
        )


@triton.jit
def line_of(span: tl.tuple, sequence: tl.tensor) -> tl.tensor:
    """Where the rows of a sequence begin in the lines that backward reads: at whole 128s, so that no block has two."""
    if span.cu_q is None:
        return 0
    else:
        return (tl.load(span.cu_q + sequence) // 128 + sequence) * 128


@triton.jit
def slope_of(scores: tl.tuple, sequence: tl.tensor, heads: tl.tensor, head: tl.tensor) -> tl.tensor:
    """ALiBi's slope in units of log₂; 0 without."""
    if scores.slopes is None:
        return 0.0
    else:
        return tl.load(scores.slopes + sequence * heads + head) * LOG2_E


@triton.jit
def bias_of(scores: tl.tuple, batch: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Where the bias of this head begins; without one, a pointer that nobody reads."""
    if scores.bias is None:
        return 0
    else:
        return scores.bias + batch.to(tl.int64) * scores.bias_batch + head.to(tl.int64) * scores.bias_head


@triton.jit
def keys_of_rows(
    first: tl.tensor, rows: tl.tensor, keys: tl.tensor, span: tl.tuple, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The blocks of keys that rows `first`… see: from begin to end, all of them whole between the middle two.

    begin –(left edge)– whole_begin –(no mask)– whole_end –(right edge)– end
    """
    last = tl.minimum(first + ROWS, rows) - 1
    shift = keys - rows
    begin, end = 0, tl.cdiv(keys, COLUMNS)
    whole_begin, whole_end = 0, keys // COLUMNS
    if span.right is not None:
        end = tl.minimum(end, tl.cdiv(tl.maximum(last + shift + span.right + 1, 0), COLUMNS))
        whole_end = tl.minimum(whole_end, tl.maximum(first + shift + span.right + 1, 0) // COLUMNS)
    if span.left is not None:
        begin = tl.minimum(tl.maximum(first + shift - span.left, 0) // COLUMNS, end)
        whole_begin = tl.cdiv(tl.maximum(last + shift - span.left, 0), COLUMNS)
    whole_begin = tl.minimum(tl.maximum(whole_begin, begin), end)
    if span.cu_q is not None:  # the block that the next sequence begins in is the tail's: see `tail_of`
        whole_begin = tl.minimum(whole_begin, tl.maximum(begin, keys // COLUMNS))
    whole_end = tl.minimum(tl.maximum(whole_end, whole_begin), end)
    return begin, whole_begin, whole_end, end


@triton.jit
def rows_of_keys(
    first: tl.tensor, rows: tl.tensor, keys: tl.tensor, span: tl.tuple, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The blocks of rows that see keys `first`…: from begin to end, all of them whole between the middle two.

    Rows beyond the last need no mask: their LSE is +∞, so that their P is 0. Nor do keys: nothing is kept of them.
    """
    last = tl.minimum(first + COLUMNS, keys) - 1
    shift = keys - rows
    begin, end = 0, tl.cdiv(rows, ROWS)
    whole_begin, whole_end = 0, end
    if span.cu_q is not None:  # behind the last row stands another sequence
        whole_end = rows // ROWS
    if span.right is not None:
        begin = tl.minimum(tl.maximum(first - shift - span.right, 0) // ROWS, end)
        whole_begin = tl.cdiv(tl.maximum(last - shift - span.right, 0), ROWS)
    if span.left is not None:
        end = tl.minimum(end, tl.cdiv(tl.maximum(last - shift + span.left + 1, 0), ROWS))
        begin = tl.minimum(begin, end)
        whole_end = tl.minimum(whole_end, tl.maximum(first - shift + span.left + 1, 0) // ROWS)
    whole_begin = tl.minimum(tl.maximum(whole_begin, begin), end)
    if span.cu_q is not None:
        whole_begin = tl.minimum(whole_begin, tl.maximum(begin, rows // ROWS))
    whole_end = tl.minimum(tl.maximum(whole_end, whole_begin), end)
    return begin, whole_begin, whole_end, end


@triton.jit
def tail_of(whole_end: tl.tensor, end: tl.tensor, length: tl.tensor, span: tl.tuple, SIZE: tl.constexpr) -> tl.tensor:
    """The first block, from `whole_end` to `end`, in which another packed sequence begins."""
    if span.cu_q is None:
        return end
    else:
        return tl.maximum(whole_end, tl.minimum(end, length // SIZE))


@triton.jit
def without(tile: tl.tensor, first: tl.tensor, length: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """A packed tile with 0 in place of the next sequence's rows: 0·NaN would be NaN."""
    return tl.where((first + tl.arange(0, SIZE) < length)[:, None], tile, 0.0)


@triton.jit
def visible(rows: tl.tensor, keys: tl.tensor, len_q: tl.tensor, len_k: tl.tensor, span: tl.tuple) -> tl.tensor:
    """Which keys each row sees; `rows` and `keys` broadcast against each other, either way round."""
    shift = len_k - len_q
    if span.right is None:
        seen = (keys < len_k) & (rows >= 0)
    elif rows.shape[0] > 1:  # what stands upright is compared once, with the end of the keys in it
        seen = keys <= tl.minimum(rows + (shift + span.right), len_k - 1)
    else:
        seen = rows >= tl.where(keys < len_k, keys - (shift + span.right), 2**31 - 1)
    if span.left is not None:
        seen &= keys >= rows + (shift - span.left)
    return seen


@triton.jit
def tanh(x: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """EXACT to FP32, also for small arguments, where the exponential's form cancels; else to 11 bits, in one step."""
    if EXACT:
        far = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
        y = x * x
        near = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0)))))
        return tl.where(tl.abs(x) < 0.2, near, far)
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def bend(s: tl.tensor, scores: tl.tuple, EXACT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Q·Kᵀ, or the softcap's tanh of it, and what either is to be multiplied by to be in units of log₂."""
    if scores.cap is None:
        return s, unit_of(scores)
    else:
        return tanh(s * scores.scale, EXACT), unit_of(scores)


@triton.jit
def unit_of(scores: tl.tuple) -> tl.tensor:
    """What Q·Kᵀ, or the softcap's tanh of it, is multiplied by to be in units of log₂."""
    if scores.cap is None:
        return scores.scale
    else:
        return scores.cap


@triton.jit
def adjust(
    s: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    len_q: tl.tensor,
    len_k: tl.tensor,
    slope: tl.tensor,
    bias: tl.tensor,
    scores: tl.tuple,
    EXACT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Q·Kᵀ → scores in units of log₂, and the softcap's tanh; `bias` points to this head's."""
    bent, unit = bend(s, scores, EXACT)
    s = bent * unit
    if scores.slopes is not None:  # converted before the difference: a row and a column, not a matrix
        s -= slope * tl.abs((rows + (len_k - len_q)).to(tl.float32) - keys.to(tl.float32))
    if scores.bias is not None:
        place = rows.to(tl.int64) * scores.bias_row + keys.to(tl.int64) * scores.bias_key
        value = tl.load(bias + place, mask=(rows < len_q) & (keys < len_k), other=0)
        if bias.dtype.element_ty == tl.uint8:
            s = tl.where(value != 0, s, float("-inf"))
        else:
            s += value.to(tl.float32) * LOG2_E
    return s, bent


@triton.jit
def probabilities(
    s: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    len_q: tl.tensor,
    len_k: tl.tensor,
    span: tl.tuple,
    scores: tl.tuple,
    slope: tl.tensor,
    bias: tl.tensor,
    leaning: tl.tensor,
    LINEAR: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """P of a tile from Q·Kᵀ and the LSE, and the softcap's tanh; rows and keys either way round.

    With `scores.near` the keys are `leaning`, and the LSE is that of scores which count from the block's first key.
    """
    if LINEAR:
        bent, unit = bend(s, scores, EXACT)
        if scores.near is not None:
            s = (bent + leaning) * unit
        else:
            s = bent * unit
    else:
        s, bent = adjust(s, rows, keys, len_q, len_k, slope, bias, scores, EXACT)
    p = tl.exp2(s - lse)
    if MASKED:
        p = tl.where(visible(rows, keys, len_q, len_k, span), p, 0.0)
    return p, bent


@triton.jit
def kept(dropout: tl.tuple, head: tl.tensor, rows: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Which elements dropout keeps: the same for the same seed, head, row and key, forward and backward."""
    zero = (rows + keys) * 0
    seed = tl.load(dropout.seed)
    word, _, _, _ = tl.philox(seed, zero + keys, zero + rows, zero + head, zero)
    return word >= dropout.threshold
