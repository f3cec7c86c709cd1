"""The golden value of a call in three kernels, in FP64 throughout: output, gradients, and what the scores are like.

Scores stay on the chip. Where gradients are wanted, probabilities and the gradients of scores are written once, some
rows of some heads at a time, so that those of k and v are plain products over them: FP64 products are so slow that
reading 8 bytes takes less than the 2·D operations that would find them again. Every sum has one order: the same call
gives the same bits.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.watching.adjusting import unexpanded

if TYPE_CHECKING:
    from assay.watching.call import AttentionCall


class Tile(NamedTuple):
    """What a program of a kernel has to itself, what it takes at a time, and how many warps it is."""

    own: int
    step: int
    warps: int


class Tiles(NamedTuple):
    """How the three kernels cut a call up."""

    forward: Tile
    """Queries, and keys at a time."""
    rows: Tile
    """The same."""
    keys: Tile
    """Keys, a multiple of what `rows` takes at a time; and queries at a time, a divisor of its own."""


TILES = {
    64: Tiles(Tile(64, 32, 4), Tile(64, 16, 4), Tile(64, 16, 4)),
    128: Tiles(Tile(32, 32, 4), Tile(32, 16, 4), Tile(32, 16, 8)),
}
"""By the widest head dimension they are for. Compiled for sm_90 without a mask, at most five registers are spilled."""
_HELD = 1 << 31
"""Bytes of probabilities and of their gradients held at a time."""
_UNLIMITED = 1 << 30
"""A window without a side."""
_PLACES = ("first_unit", "first_row", "stop_row", "heads", "all_rows", "left", "right")
"""Arguments that compiled code need not know more about."""
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}


def golden(
    call: AttentionCall, grad: Tensor | None, hidden: float, tiles: Tiles | None = None, held: int = _HELD
) -> tuple[tuple[Tensor, ...], Tensor]:
    """As `plain` in FP64; and `scores.of_rows` of all rows, ties as they are in the call's own format.

    Scores below `hidden` count as hidden there. `held` is how many bytes of P and dS are held at a time.
    """
    (_, heads, queries, dim), (keys, value_dim) = call.q.shape, call.v.shape[2:]
    q, k, v = (call.q.double() * call.scale).contiguous(), call.k.double().contiguous(), call.v.double().contiguous()
    out, found = q.new_empty(*q.shape[:3], value_dim), q.new_empty(4, *q.shape[:3])
    factors = q.new_empty(2, *q.shape[:3])
    wide, value_wide = (max(16, triton.next_power_of_2(x)) for x in (dim, value_dim))
    tiles = tiles or next(each for limit, each in TILES.items() if max(wide, value_wide) <= limit)
    adjusting, sinks = _adjusting(call)
    common = {
        "queries": queries, "keys": keys, "left": _side(call.left), "right": _side(call.right),
        "GROUP": heads // call.k.shape[1], "DIM": dim, "VALUE_DIM": value_dim, "WIDE": wide, "VALUE_WIDE": value_wide,
    }  # fmt: skip
    # Triton launches on the current device, which need not be theirs. For a CPU tensor this does nothing.
    with torch.cuda.device_of(q):
        own, step, warps = tiles.forward
        _forward[(triton.cdiv(queries, own) * q.shape[:2].numel(),)](
            q, k, v, out, factors, found, **adjusting, **sinks, **common, HIDDEN=hidden, DTYPE=_DTYPES[call.dtype],
            ROWS=own, KEYS=step, num_warps=warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        if grad is None:
            return (out,), found
        g = grad.double().contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        _gradients((q, k, v, g, out, dq, dk, dv, factors), adjusting, common, tiles, held)
    return (out, dq, dk, dv), found


def _gradients(
    tensors: tuple[Tensor, ...], adjusting: dict[str, Any], common: dict[str, Any], tiles: Tiles, held: int
) -> None:
    """Some rows of some groups of heads at a time: all rows where those of one group can be held."""
    q, k, v, g, out, dq, dk, dv, factors = tensors
    queries, group, units = q.shape[2], common["GROUP"], k.shape[:2].numel()
    width, tall = (triton.cdiv(x.shape[2], tile.own) * tile.own for x, tile in ((k, tiles.keys), (q, tiles.rows)))
    row = 2 * 8 * group * width
    most, height = min(units, held // (row * tall)), tall
    if most:
        most = triton.cdiv(units, triton.cdiv(units, most))  # all times about as many
    else:
        most, height = 1, max(1, held // (row * tiles.rows.own)) * tiles.rows.own
    p, ds = q.new_empty(most * group, height, width), q.new_empty(most * group, height, width)
    common = common | {"height": height, "width": width, "ROWS": tiles.rows.own, "SPAN": tiles.keys.own}
    for unit, row in itertools.product(range(0, units, most), range(0, queries, height)):
        here, stop = min(most, units - unit), min(row + height, queries)
        _row_gradients[(triton.cdiv(stop - row, tiles.rows.own) * here * group,)](
            q, k, v, g, out, dq, factors, p, ds, **adjusting, **common, first_unit=unit, first_row=row, stop_row=stop,
            KEYS=tiles.rows.step, num_warps=tiles.rows.warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        _key_gradients[(width // tiles.keys.own * here,)](
            q, g, p, ds, dk, dv, **common, first_unit=unit, first_row=row, stop_row=stop,
            DEPTH=tiles.keys.step, num_warps=tiles.keys.warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip


def _side(limit: int | None) -> int:
    return _UNLIMITED if limit is None else max(-_UNLIMITED, min(limit, _UNLIMITED))


def _adjusting(call: AttentionCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is done to the scores; and what is beside them."""
    batch, heads, queries, _ = call.q.shape
    bias, slopes, sinks = call.bias, call.slopes, call.sinks
    if bias is not None:
        bias = _in_double(bias).expand(batch, heads, queries, call.k.shape[2])
    strides = (0, 0, 0, 0) if bias is None else bias.stride()
    numbers = call.q.new_full((2,), call.scale, dtype=torch.float64)  # as arguments they would be FP32
    if call.softcap is not None:
        numbers[1:].fill_(call.softcap)
    adjusting = {
        "bias": numbers if bias is None else bias,
        **dict(zip(("bias_b", "bias_h", "bias_q", "bias_k"), strides, strict=True)),
        "slopes": numbers if slopes is None else slopes.double().expand(batch, heads).contiguous(),
        "numbers": numbers, "heads": heads, "all_rows": batch * heads * queries,
        "BIAS": bias is not None, "SLOPES": slopes is not None, "SOFTCAP": call.softcap is not None,
    }  # fmt: skip
    return adjusting, {"sinks": numbers if sinks is None else sinks.double().contiguous(), "SINKS": sinks is not None}


def _in_double(bias: Tensor) -> Tensor:
    """As it is added. Triton 3.6 lays out what it multiplies by the narrowest number it is made of, so all are FP64."""
    bias = unexpanded(bias)
    if bias.dtype != torch.bool:
        return bias.double()
    return torch.zeros(bias.shape, dtype=torch.float64, device=bias.device).masked_fill_(~bias, -torch.inf)


@triton.jit
def _rounded(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """As torch rounds FP64: to FP32 first."""
    if DTYPE != tl.float64:  # noqa: SIM300
        x = x.to(tl.float32).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _nonzero(x: tl.tensor) -> tl.tensor:
    return tl.where(x == 0.0, 1.0, x)


@triton.jit
def _scores(
    q: tl.tensor, k: tl.tensor, rows: tl.tensor, at: tl.tensor, adjusting: tl.tuple, queries: int, keys: int,
    left: int, right: int, BIAS: tl.constexpr, SLOPES: tl.constexpr, SOFTCAP: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """Of a tile, -inf where hidden; and their derivatives by q·k, 1 without a softcap."""
    bias, bias_q, bias_k, slope, softcap = adjusting
    s = tl.dot(q, tl.trans(k), out_dtype=tl.float64)
    slack = s
    if SOFTCAP:
        # The tangent by the exponential is exact to an ulp of 1, which is how scores count.
        tangent = 1.0 - 2.0 / (tl.exp(s / softcap * 2.0) + 1.0)
        s, slack = softcap * tangent, 1.0 - tangent * tangent
    own = rows[:, None] + (keys - queries)
    if SLOPES:
        s -= slope * tl.abs(own - at[None, :]).to(tl.float64)
    visible = (at[None, :] < keys) & (at[None, :] >= own - left) & (at[None, :] <= own + right)
    if BIAS:
        there = bias + rows.to(tl.int64)[:, None] * bias_q + at.to(tl.int64)[None, :] * bias_k
        added = tl.load(there, mask=visible & (rows < queries)[:, None], other=0.0)
        s = tl.where(added == -float("inf"), added, s + added)  # also where s is NaN
    return tl.where(visible, s, -float("inf")), slack


@triton.jit
def _seen(
    first: int, queries: int, keys: int, left: int, right: int, ROWS: tl.constexpr, SPAN: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """From which key to which the rows from `first` on see any, in whole spans."""
    begin = tl.maximum(first + keys - queries - left, 0) // SPAN * SPAN
    last = tl.minimum(tl.minimum(first + ROWS, queries) + keys - queries + right, keys)
    return begin, tl.cdiv(last, SPAN) * SPAN


@triton.jit
def _tile(start: tl.tensor, at: tl.tensor, count: int, DIM: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Some rows of (count, DIM), with 0 beyond it."""
    dims = tl.arange(0, WIDE)
    mask = (at < count)[:, None] if DIM == WIDE else (at < count)[:, None] & (dims < DIM)[None, :]
    return tl.load(start + at[:, None] * DIM + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _put(
    start: tl.tensor, x: tl.tensor, at: tl.tensor, count: int, DIM: tl.constexpr, WIDE: tl.constexpr
) -> None:  # fmt: skip
    dims = tl.arange(0, WIDE)
    tl.store(start + at[:, None] * DIM + dims[None, :], x, mask=(at < count)[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=_PLACES)
def _forward(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, factors: tl.tensor, found: tl.tensor,
    bias: tl.tensor, slopes: tl.tensor, sinks: tl.tensor, numbers: tl.tensor,
    bias_b: int, bias_h: int, bias_q: int, bias_k: int, heads: int, all_rows: int, queries: int, keys: int, left: int,
    right: int,
    HIDDEN: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Some rows of a head: `out`, found[:, row] as `triton_scores` has it, and what makes scores probabilities."""
    tiles = tl.cdiv(queries, ROWS)
    head, tile = (tl.program_id(0) // tiles).to(tl.int64), tiles - 1 - tl.program_id(0) % tiles  # causal: longest first
    rows = tile * ROWS + tl.arange(0, ROWS)
    begin, end = _seen(tile * ROWS, queries, keys, left, right, ROWS, KEYS)
    k += head // GROUP * keys * DIM
    v += head // GROUP * keys * VALUE_DIM
    own_q = _tile(q + head * queries * DIM, rows, queries, DIM, WIDE)
    slope = tl.load(slopes + head) if SLOPES else 0.0
    adjusting = (bias + head // heads * bias_b + head % heads * bias_h, bias_q, bias_k, slope, tl.load(numbers + 1))

    # The highest score of the keys and how many share it, and the highest of all: a sink may be higher.
    most, ties = tl.full([ROWS], -float("inf"), tl.float64), tl.zeros([ROWS], tl.int32)
    top, low = most, tl.full([ROWS], float("inf"), tl.float64)
    if SINKS:
        top = tl.zeros([ROWS], tl.float64) + tl.load(sinks + head % heads)
    total, weighted = tl.zeros([ROWS], tl.float64), tl.zeros([ROWS], tl.float64)
    y = tl.zeros([ROWS, VALUE_WIDE], tl.float64)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        s, _ = _scores(
            own_q, _tile(k, at, keys, DIM, WIDE), rows, at, adjusting, queries, keys, left, right, BIAS, SLOPES, SOFTCAP
        )
        highest = tl.maximum(most, tl.max(s, 1))
        tied = _rounded(highest, DTYPE)
        ties = tl.where(tied == _rounded(most, DTYPE), ties, 0)
        ties += tl.sum((_rounded(s, DTYPE) == tied[:, None]).to(tl.int32), 1)
        most = highest
        next_top = tl.maximum(top, highest)
        base = tl.where(next_top == -float("inf"), 0.0, next_top)
        share, visible = tl.exp(s - base[:, None]), s > HIDDEN
        less = tl.exp(top - base)
        drop = tl.where(top > HIDDEN, top - base, 0.0)
        weighted = less * (weighted + drop * total)
        weighted += tl.sum(share * tl.where(visible, s - base[:, None], 0.0), 1)
        low = tl.minimum(low, tl.min(tl.where(visible, s, float("inf")), 1))
        total = total * less + tl.sum(share, 1)
        y = tl.dot(share, _tile(v, at, keys, VALUE_DIM, VALUE_WIDE), y * less[:, None], out_dtype=tl.float64)
        top = next_top

    base = tl.where(top == -float("inf"), 0.0, top)
    whole = total
    if SINKS:
        whole += tl.exp(tl.load(sinks + head % heads) - base)
    inverse = 1.0 / _nonzero(whole)
    y *= inverse[:, None]
    _put(out + head * queries * VALUE_DIM, y, rows, queries, VALUE_DIM, VALUE_WIDE)
    entropy = (total * tl.log(_nonzero(whole)) - weighted) * inverse
    nan = (total != total) & (most != float("inf"))  # max and min pass over them
    place, inside = head * queries + rows, rows < queries
    tl.store(factors + place, base, mask=inside)
    tl.store(factors + all_rows + place, inverse, mask=inside)
    place = found + place
    tl.store(place, tl.where(nan, total, low), mask=inside)
    tl.store(place + all_rows, tl.where(nan, total, most), mask=inside)
    tl.store(place + 2 * all_rows, tl.where(entropy < 0, 0.0, entropy), mask=inside)
    tl.store(place + 3 * all_rows, ((most > HIDDEN) & (ties > 1)).to(tl.float64), mask=inside)


@triton.jit(do_not_specialize=_PLACES)
def _row_gradients(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, grad: tl.tensor, out: tl.tensor, dq: tl.tensor, factors: tl.tensor,
    p: tl.tensor, ds: tl.tensor, bias: tl.tensor, slopes: tl.tensor, numbers: tl.tensor,
    bias_b: int, bias_h: int, bias_q: int, bias_k: int, first_unit: int, first_row: int, stop_row: int,
    height: int, width: int, heads: int, all_rows: int, queries: int, keys: int, left: int, right: int,
    BIAS: tl.constexpr, SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Some rows of a head: `dq`; the probabilities and the gradients of scores of these rows."""
    tiles = tl.cdiv(stop_row - first_row, ROWS)
    here, tile = (tl.program_id(0) // tiles).to(tl.int64), tiles - 1 - tl.program_id(0) % tiles
    head = first_unit * GROUP + here
    rows = first_row + tile * ROWS + tl.arange(0, ROWS)
    begin, end = _seen(first_row + tile * ROWS, queries, keys, left, right, ROWS, SPAN)
    k += head // GROUP * keys * DIM
    v += head // GROUP * keys * VALUE_DIM
    slope = tl.load(slopes + head) if SLOPES else 0.0
    adjusting = (bias + head // heads * bias_b + head % heads * bias_h, bias_q, bias_k, slope, tl.load(numbers + 1))
    base = tl.load(factors + head * queries + rows, mask=rows < queries, other=0.0)
    inverse = tl.load(factors + all_rows + head * queries + rows, mask=rows < queries, other=0.0)
    own_q = _tile(q + head * queries * DIM, rows, queries, DIM, WIDE)
    g = _tile(grad + head * queries * VALUE_DIM, rows, queries, VALUE_DIM, VALUE_WIDE)
    delta = tl.sum(g * _tile(out + head * queries * VALUE_DIM, rows, queries, VALUE_DIM, VALUE_WIDE), 1)
    x = tl.zeros([ROWS, WIDE], tl.float64)
    place = (here * height + tile * ROWS + tl.arange(0, ROWS))[:, None] * width
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        own_k = _tile(k, at, keys, DIM, WIDE)
        s, slack = _scores(own_q, own_k, rows, at, adjusting, queries, keys, left, right, BIAS, SLOPES, SOFTCAP)
        share = tl.exp(s - base[:, None]) * inverse[:, None]
        tl.store(p + place + at[None, :], share)
        own_v = _tile(v, at, keys, VALUE_DIM, VALUE_WIDE)
        change = share * (tl.dot(g, tl.trans(own_v), out_dtype=tl.float64) - delta[:, None])
        if SOFTCAP:
            change *= slack
        tl.store(ds + place + at[None, :], change)
        x = tl.dot(change, own_k, x, out_dtype=tl.float64)
    _put(dq + head * queries * DIM, x * tl.load(numbers), rows, queries, DIM, WIDE)


@triton.jit(do_not_specialize=_PLACES)
def _key_gradients(
    q: tl.tensor, grad: tl.tensor, p: tl.tensor, ds: tl.tensor, dk: tl.tensor, dv: tl.tensor,
    first_unit: int, first_row: int, stop_row: int, height: int, width: int, queries: int, keys: int, left: int,
    right: int, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDE: tl.constexpr,
    VALUE_WIDE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Some keys, for all heads that share them: dk += dSᵀ·q and dv += Pᵀ·grad over the rows of the first kernel."""
    spans = width // SPAN
    here, first = (tl.program_id(0) // spans).to(tl.int64), tl.program_id(0) % spans * SPAN
    unit = first_unit + here
    at, ahead = first + tl.arange(0, SPAN), keys - queries
    # Tiles of rows that have been at these keys; others have written nothing here.
    begin = tl.maximum(first - ahead - right, first_row)
    begin = tl.where(begin < stop_row, begin // ROWS * ROWS, stop_row)
    end = tl.minimum(tl.cdiv(first + SPAN + left - ahead, ROWS) * ROWS, stop_row)
    dk += unit * keys * DIM
    dv += unit * keys * VALUE_DIM
    of_k, of_v = _tile(dk, at, keys, DIM, WIDE), _tile(dv, at, keys, VALUE_DIM, VALUE_WIDE)
    for member in range(GROUP):
        head = unit * GROUP + member
        their_q, their_grad = q + head * queries * DIM, grad + head * queries * VALUE_DIM
        place = (here * GROUP + member) * height - first_row
        for start in range(begin, end, DEPTH):
            rows = start + tl.arange(0, DEPTH)
            there = (place + rows)[:, None] * width + at[None, :]
            share, change = tl.load(p + there), tl.load(ds + there)
            g = _tile(their_grad, rows, queries, VALUE_DIM, VALUE_WIDE)
            of_v = tl.dot(tl.trans(share), g, of_v, out_dtype=tl.float64)
            own_q = _tile(their_q, rows, queries, DIM, WIDE)
            of_k = tl.dot(tl.trans(change), own_q, of_k, out_dtype=tl.float64)
    _put(dk, of_k, at, keys, DIM, WIDE)
    _put(dv, of_v, at, keys, VALUE_DIM, VALUE_WIDE)
