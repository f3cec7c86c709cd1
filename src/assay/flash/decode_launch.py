"""Decoding on CUDA: the keys split over the GPU, and the splits merged."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.flash import gpu, replay
from assay.flash.decode import CacheCall, empty_results
from assay.flash.kernels.decode import attention_decode, merge_splits
from assay.flash.kernels.tile import Scores, Span, precision
from assay.flash.layout import padded
from assay.flash.tuning import Tile

_LOG2_E = 1.4426950408889634
_LEAST_KEYS = 128
"""Of a split: below this its start and its share of the merge take longer than its keys."""
_INVARIANT_KEYS = 512
"""Of a split, always, if the batch must not change a sequence's bits."""
_PROGRAMS = 2
"""For each multiprocessor of the GPU."""
_MERGED_AT_ONCE = 16
_FAR = 2**30
"""A window's side beyond all lengths, within int32."""
_Strides = tuple[int, ...]


def launch(call: CacheCall) -> tuple[Tensor, Tensor]:
    """Output and LSE. As before, where there was a call like it: not for a scale of 0, which is one key with −0."""
    out, lse = empty_results(call.q, call.k, call.v)
    tensors = (call.q, call.k, call.v, call.lengths, call.table, call.slopes, call.sinks, out, lse)
    options = (
        "decode", call.longest, call.scale, call.left, call.right, call.softcap, call.splits, call.batch_invariant,
    )  # fmt: skip
    if call.scale == 0 or not replay.can(call.q):
        _launch(call, out, lse)
    else:
        replay.replayed(tensors, options, lambda: _launch(call, out, lse))
    return out, lse


def _launch(call: CacheCall, out: Tensor, lse: Tensor) -> None:
    """One kernel over all splits, and where there are several, one that merges them."""
    q, k = call.q, call.k
    rows = q.shape[2] * (q.shape[1] // k.shape[1])
    tile = _tile(call, rows)
    row_blocks = _ceil(rows, tile.rows)
    splits, least = _splits(call, tile.columns, q.shape[0] * k.shape[1] * row_blocks)
    if splits == 1:
        _attend(call, tile, row_blocks, splits, least, out, (0, *out.stride()[:3]), lse, (0, *lse.stride()))
        return
    batch, heads, queries, dim = out.shape
    parts = replay.room((splits, batch, queries, heads, dim), torch.float32, q.device)  # as the output lies in memory
    part_lse = replay.room((splits, batch, heads, queries), torch.float32, q.device)
    strides = parts.transpose(2, 3).stride()[:4]
    _attend(call, tile, row_blocks, splits, least, parts, strides, part_lse, part_lse.stride())
    replay.launch(
        merge_splits, (batch * heads * queries,),
        parts, strides, part_lse, part_lse.stride(), out, (0, *out.stride()[:3]), lse, (0, *lse.stride()),
        None if call.sinks is None else call.sinks.contiguous(), splits, heads, queries, dim, padded(dim),
        _MERGED_AT_ONCE,
    )  # fmt: skip


def _attend(
    call: CacheCall, tile: Tile, row_blocks: int, splits: int, least: int,
    out: Tensor, out_strides: _Strides, lse: Tensor, lse_strides: _Strides,
) -> None:  # fmt: skip
    """Each split's output and LSE; strides are of (splits, B, H, queries, …)."""
    q, k, v, table, cap = call.q, call.k, call.v, call.table, call.softcap
    (batch, heads, queries, dim), kv_heads = q.shape, k.shape[1]
    left, right = (None if side is None else min(side, _FAR) for side in (call.left, call.right))
    scale = call.scale * _LOG2_E if cap is None else call.scale / cap
    replay.launch(
        attention_decode,
        (splits * row_blocks * batch, kv_heads),
        q,
        q.stride(),
        k,
        k.stride(),
        v,
        v.stride(),
        None if call.lengths is None else call.lengths.contiguous(),
        table,
        None if table is None else table.stride(),
        out,
        out_strides,
        lse,
        lse_strides,
        None if call.sinks is None else call.sinks.contiguous(),
        Span(queries, None, left, right),
        Scores(scale, None if cap is None else cap * _LOG2_E, call.slopes),
        call.longest,
        heads,
        splits,
        least,
        splits == 1,
        heads // kv_heads,
        None if table is None else k.shape[2],
        dim,
        v.shape[3],
        tile.rows,
        tile.columns,
        padded(dim),
        padded(v.shape[3]),
        precision(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _tile(call: CacheCall, rows: int) -> Tile:
    """Rows of one KV head, keys, warps and stages. With few rows all that counts is how many loads are under way."""
    wide = max(call.q.shape[3], call.v.shape[3]) > 128
    if call.q.dtype == torch.float32:
        return Tile(16, 32, 8, 2)
    rows = min(padded(rows), 128)
    warps = 8 if rows == 128 or (wide and rows == 64) else 4
    # Pages are loaded before their keys are: the same keys under way take twice the stages.
    return Tile(rows, 32 if wide else 64, warps, 3 if call.table is None else 5)


def _splits(call: CacheCall, columns: int, programs: int) -> tuple[int, int]:
    """Into how many splits the keys are cut, and how many blocks of keys a split has at the least.

    From what the host knows, the capacity: the kernel cuts the keys that a sequence has into as many parts. With a
    fixed size there are splits enough for all blocks, so that each is of the least size.
    """
    blocks = _ceil(call.longest, columns)
    if call.left is not None and call.right is not None:
        blocks = min(blocks, _ceil(call.left + call.right + call.q.shape[2], columns) + 1)
    if call.splits is not None:
        return call.splits, 1
    if call.batch_invariant:
        least = _INVARIANT_KEYS // columns
        return max(1, _ceil(blocks, least)), least
    least = _LEAST_KEYS // columns
    processors = gpu.processors(call.q.device.index) if call.q.is_cuda else 1
    wanted = _ceil(_PROGRAMS * processors, max(1, programs))
    return max(1, min(wanted, _ceil(blocks, least))), least


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
