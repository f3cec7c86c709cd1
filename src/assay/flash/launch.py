"""Runs the Triton kernels on one `Call`: layouts, tiles, grids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.flash import decode_launch, hopper, hopper_forward, replay
from assay.flash.call import Call, Gradients
from assay.flash.decode import CacheCall
from assay.flash.descriptors import row_tiles, tiles
from assay.flash.kernels.backward import attention_backward_kv, attention_backward_q, attention_prepare_backward
from assay.flash.kernels.bias import attention_backward_bias
from assay.flash.kernels.forward import Knobs, attention_forward
from assay.flash.kernels.tile import Dropout, Scores, Span, precision
from assay.flash.layout import aligned, empty_gradient, empty_output, padded
from assay.flash.numerics import NAMES, SHIPPED, Numerics
from assay.flash.places import places
from assay.flash.tuning import Tile, is_trying, tile_for

FEW, MANY = 16, 1024
"""So many queries at most, over so many keys at least: the keys are split."""
LARGEST_ROWS = 128
"""That a tile of a backward kernel may have."""
_REGISTERS = 168
"""Of a thread with ALiBi at most: three programs of four warps stay on a multiprocessor, as many as without."""
_LOG2_E = 1.4426950408889634


class Passed(NamedTuple):
    """What the forward pass made, its gradients, and what the backward pass makes of it for every row."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    log2_lse: torch.Tensor
    """The LSE in units of log₂; this and delta are (B·H, room): see `line_of`."""
    delta: torch.Tensor


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The output in q's dtype, and the LSE (B, H, queries) in FP32."""
    out = empty_output(call.q, call.v.shape[3])
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    if out.shape[0] == 0 or out.shape[2] == 0 or call.k.shape[2] == 0:
        return out.zero_(), _lse_of_nothing(call, lse)
    if _few_queries(call):
        split, lse = decode_launch.launch(_as_decoding(call))
        out.copy_(split)
    else:
        _replayed("forward", call, (out, lse), lambda: _forward(call, out, lse))
    return out, lse


def _replayed(name: str, call: Call, results: tuple[torch.Tensor | None, ...], work: Callable[[], None]) -> None:
    """`work`, which only launches kernels, from what the call says. As before, where there was one like it.

    Not for a scale of 0, which is one key with −0. One list of lengths for queries and keys is given once.
    """
    if is_trying() or call.scale == 0 or not replay.can(call.q):
        work()
        return
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    lengths = cu_q, None if cu_k is cu_q else cu_k
    tensors = (call.q, call.k, call.v, call.bias, call.slopes, call.sinks, call.seed, *lengths, *results)
    options = (
        name, call.scale, call.left, call.right, call.softcap, call.dropout, call.deterministic, call.batch_invariant,
        call.tf32, call.numerics,
    )  # fmt: skip
    replay.replayed(tensors, options, work)


def _few_queries(call: Call) -> bool:
    """Too few rows to fill a GPU, over many keys: these are then split over it, as in decoding."""
    few = call.q.shape[2] <= FEW and call.k.shape[2] >= MANY
    plain = call.bias is None and call.dropout == 0 and call.numerics == SHIPPED and not call.tf32
    return few and plain and not call.packed


def _as_decoding(call: Call) -> CacheCall:
    return CacheCall(
        q=call.q,
        k=call.k,
        v=call.v,
        lengths=None,
        table=None,
        slopes=call.slopes,
        sinks=call.sinks,
        longest=call.k.shape[2],
        scale=call.scale,
        left=call.left,
        right=call.right,
        softcap=call.softcap,
        splits=None,
        batch_invariant=call.batch_invariant,
    )


def _forward(call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    q, k, v = _positive_scale(call)
    if hopper.can(call):
        hopper_forward.forward(call, q, k, v, out, lse, _span(call), _scores(call))
        return
    tile = tile_for("forward", call)
    replay.launch(
        attention_forward,
        (call.tiles("q", tile.rows), q.shape[1], q.shape[0]),
        tiles(q, tile.rows),
        tiles(k, tile.columns),
        tiles(v, tile.columns),
        out,
        out.stride()[:3],
        lse,
        call.sinks,
        _span(call),
        _scores(call),
        _dropout(call),
        _knobs(call.numerics, v.dtype),
        heads=q.shape[1],
        group=call.group,
        VALUE_DIM=v.shape[3],
        LINEAR=_linear(call),
        **_sizes(call, tile),
        **({"maxnreg": _REGISTERS} if call.near and padded(q.shape[3]) <= 64 else {}),
    )


def backward(
    call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, needs_bias: bool
) -> Gradients:
    """The gradients of everything that has one."""
    dq, dk, dv = (empty_gradient(x) for x in (call.q, call.k, call.v))
    if dq.numel() == 0 or dk.numel() == 0:
        dbias = call.bias.new_zeros(call.bias.shape) if needs_bias and call.bias is not None else None
        dsinks = None if call.sinks is None else torch.zeros_like(call.sinks)
        if dsinks is not None and dlse is not None:  # without keys the LSE is the sink
            dsinks += dlse.sum((0, 2)).to(dsinks.dtype)
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), dbias, dsinks)
    passed = Passed(out, lse, dout, dlse, *_rows(call, lse))
    dbias = call.bias.new_empty(call.bias.shape) if needs_bias and call.bias is not None else None
    grads = Gradients(dq, dk, dv, dbias, None)
    _replayed("backward", call, (*passed, *grads), lambda: _backward(call, passed, grads))
    if call.sinks is not None:  # dP of the sink is 0: it has no value
        share = torch.exp(call.sinks.float()[:, None] - lse).masked_fill_(lse == -torch.inf, 0.0)
        dsinks = -(share * _lines(call, passed.delta)).sum((0, 2)).to(call.sinks.dtype)
        return grads._replace(sinks=dsinks)
    return grads


def _backward(call: Call, passed: Passed, grads: Gradients) -> None:
    """Fill the gradients, but the sinks'; and `log2_lse` and `delta`."""
    adds_up, span = hopper.adds_up(call), _span(call)
    sums = (*passed.delta.shape, padded(call.q.shape[3]))
    dq_sums = replay.room(sums, torch.float32, call.q.device) if adds_up else None
    _prepare(call, passed, dq_sums, span)
    rest = (span, _scores(call))
    tensors = (*_positive_scale(call), aligned(passed.dout), passed.log2_lse, passed.delta)
    if hopper.takes_backward(call):
        hopper.backward(call, tensors, dq_sums, grads.q, grads.k, grads.v, *rest)
    elif hopper.takes_backward_kv_large(call):
        hopper.backward_kv_large(call, tensors, grads.k, grads.v, *rest)
    else:
        _backward_kv(call, tensors, grads.k, grads.v, rest)
    if dq_sums is None and hopper.can(call):
        hopper.backward_q(call, tensors, grads.q, *rest)
    elif dq_sums is None:
        _backward_q(call, tensors, grads.q, rest)
    if grads.bias is not None:
        _backward_bias(call, grads.bias, tensors, rest)


def _rows(call: Call, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For `log2_lse` and `delta`."""
    (batch, heads, queries), cu = lse.shape, call.cu_seqlens_q
    room = (-(-queries // LARGEST_ROWS) + (0 if cu is None else len(cu))) * LARGEST_ROWS
    if cu is None:
        return lse.new_empty(batch * heads, room), lse.new_empty(batch * heads, room)
    log2_lse, delta = lse.new_zeros(2, batch * heads, room).unbind()  # a sequence without rows has a line all the same
    return log2_lse, delta


def _prepare(call: Call, passed: Passed, dq_sums: torch.Tensor | None, span: Span) -> None:
    """Fill `log2_lse` and `delta`; and `dq_sums` with 0s, but for what `overwrites` it."""
    out, lse, dout, dlse, log2_lse, delta = passed
    (batch, heads), dim, room = lse.shape[:2], out.shape[3], delta.shape[1]
    strides = out.stride(), dout.stride(), None if dlse is None else dlse.stride()
    rows = LARGEST_ROWS if call.packed else 64
    zeros = None if dq_sums is None or hopper.overwrites(call) else dq_sums
    blocks = call.tiles("q", rows) if call.packed else -(-room // rows)
    replay.launch(
        attention_prepare_backward, (blocks, heads, batch),
        out, dout, lse, dlse, log2_lse, delta, zeros, *strides, places(call, "q", blocks, rows),
        span, room, heads, dim, padded(dim), rows, num_warps=rows // 16,
    )  # fmt: skip


def _lines(call: Call, x: torch.Tensor) -> torch.Tensor:
    """(B, H, queries) of the (B·H, room) that `attention_prepare_backward` fills."""
    batch, heads, queries = call.q.shape[:3]
    x, cu = x.view(batch, heads, -1), call.cu_seqlens_q
    if cu is None:
        return x[..., :queries]
    row = torch.arange(queries, dtype=torch.int32, device=x.device)
    sequence = torch.searchsorted(cu[1:], row, right=True)
    first = cu[sequence]
    return x[..., (first // LARGEST_ROWS + sequence) * LARGEST_ROWS + row - first]


def _backward_kv(
    call: Call, tensors: hopper.Tensors, dk: torch.Tensor, dv: torch.Tensor, rest: tuple[Any, ...]
) -> None:
    """Large heads sum dK and dV up one after the other: the registers do not hold both."""
    large = max(call.q.shape[3], call.v.shape[3]) > 128
    for wanted in ("k", "v") if large else ("kv",):
        tile = tile_for(f"backward_{wanted}", call)
        matrices, rows = _all_tiles(tensors, tile)
        replay.launch(
            attention_backward_kv,
            (call.tiles("k", tile.columns), dk.shape[1], dk.shape[0]),
            *matrices,
            dk,
            dv,
            dk.stride()[:3],
            dv.stride()[:3],
            *rows,
            *rest,
            abs(call.scale),
            _dropout(call),
            heads=call.q.shape[1],
            group=call.group,
            DIM=dk.shape[3],
            VALUE_DIM=dv.shape[3],
            LINEAR=_linear(call),
            SPLIT=tile.split,
            WANTED=wanted,
            **_sizes(call, tile),
        )


def _backward_q(call: Call, tensors: hopper.Tensors, dq: torch.Tensor, rest: tuple[Any, ...]) -> None:
    tile = tile_for("backward_q", call)
    matrices, rows = _all_tiles(tensors, tile)
    replay.launch(
        attention_backward_q,
        (call.tiles("q", tile.rows), dq.shape[1], dq.shape[0]),
        *matrices,
        dq,
        dq.stride()[:3],
        *rows,
        *rest,
        call.scale,
        _dropout(call),
        heads=dq.shape[1],
        group=call.group,
        DIM=dq.shape[3],
        LINEAR=_linear(call),
        SPLIT=tile.split,
        **_sizes(call, tile),
    )


def _backward_bias(call: Call, dbias: torch.Tensor, tensors: hopper.Tensors, rest: tuple[Any, ...]) -> None:
    tile = tile_for("backward_bias", call)
    grid, summed = _bias_grid(call, dbias, tile)
    matrices, rows = _all_tiles(tensors, tile)
    replay.launch(
        attention_backward_bias,
        grid,
        *matrices,
        dbias,
        dbias.stride(),
        *rows,
        *rest,
        _dropout(call),
        summed,
        heads=call.q.shape[1],
        group=call.group,
        SUM_ROWS=dbias.shape[2] != call.q.shape[2],
        SUM_KEYS=dbias.shape[3] != call.k.shape[2],
        **_sizes(call, tile),
    )


def key_blocks(call: Call) -> tuple[int, bool]:
    """How many keys the forward kernel takes at once, and whether from the last to the first: the order of its sums."""
    if hopper.can(call):
        return hopper.columns(call), True
    return tile_for("forward", call).columns, call.numerics.reverse_keys


def _all_tiles(tensors: hopper.Tensors, tile: Tile) -> tuple[Iterator[TensorDescriptor], Iterator[TensorDescriptor]]:
    """Those of Q, K, V and dO, and those of the LSE and delta."""
    matrices = map(tiles, tensors[:4], (tile.rows, tile.columns, tile.columns, tile.rows))
    return matrices, (row_tiles(x, tile.rows) for x in tensors[4:])


def _sizes(call: Call, tile: Tile) -> dict[str, Any]:
    """What every kernel takes at compile time."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "BLOCK_DIM": padded(call.q.shape[3]),
        "BLOCK_VALUE_DIM": padded(call.v.shape[3]),
        "PRECISION": precision(call.q.dtype, call.tf32),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _positive_scale(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V as the kernels take them. A negative scale is Q's sign: the maximum commutes with a positive one."""
    return aligned(-call.q if call.scale < 0 else call.q), aligned(call.k), aligned(call.v)


def _linear(call: Call) -> bool:
    """Whether the scores are Q·Kᵀ, or its softcap's tanh, or near ALiBi on top, times a positive number."""
    return call.scales and (call.slopes is None or call.near)


def _lse_of_nothing(call: Call, lse: torch.Tensor) -> torch.Tensor:
    return lse.fill_(-torch.inf) if call.sinks is None else lse.copy_(call.sinks[:, None])


def _span(call: Call) -> Span:
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    sequences = None if cu_q is None else len(cu_q) - 1
    return Span(call.q.shape[2], call.k.shape[2], call.left, call.right, cu_q, cu_k, sequences)


def _scores(call: Call) -> Scores:
    scale, bias = abs(call.scale), call.bias
    strides: tuple[int, ...] = ()
    if bias is not None:
        strides = bias.expand(*call.q.shape[:3], call.k.shape[2]).stride()
        bias = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    return Scores(
        scale * _LOG2_E if call.softcap is None else scale / call.softcap,
        None if call.softcap is None else call.softcap * _LOG2_E,
        call.slopes,
        triton.language.constexpr(True) if call.near else None,
        bias,
        *strides,
    )


def _dropout(call: Call) -> Dropout:
    if call.dropout == 0:
        return Dropout(None, None, None)
    return Dropout(call.seed, int(call.dropout * 2**32), 1 / (1 - call.dropout))


@cache
def _knobs(numerics: Numerics, dtype: torch.dtype) -> Knobs:
    values: tuple[Any, ...] = (
        numerics.pieces(dtype),
        numerics.probabilities or NAMES[dtype],
        numerics.row_sum,
        numerics.rescale,
        numerics.output_accumulator,
        numerics.sum_after_cast,
        numerics.reverse_keys,
    )
    return Knobs(*map(triton.language.constexpr, values))


def _bias_grid(call: Call, bias: torch.Tensor, tile: Tile) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Programs, and how many batches, heads, blocks of rows and of keys one sums up: 1, or all where bias has 1."""
    blocks = (*call.q.shape[:2], -(-call.q.shape[2] // tile.rows), -(-call.k.shape[2] // tile.columns))
    lengths = (*call.q.shape[:3], call.k.shape[2])
    own = [size == full for size, full in zip(bias.shape, lengths, strict=True)]
    batches, heads, rows, columns = (count if mine else 1 for count, mine in zip(blocks, own, strict=True))
    return (rows * columns, heads, batches), tuple(1 if mine else n for n, mine in zip(blocks, own, strict=True))
