"""How the CPU's own path cuts a call: into parts (batches and heads of K), blocks of rows, blocks of keys.

A part's query heads are folded into its rows, so that K and V are never repeated: matrices are (heads of K in the
part, group · rows, …). The size of a block depends on the lengths and the group only, never on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from assay.flash.call import Call
from assay.flash.cpu_dropout import Dropout

ROWS = 256
"""Rows of a block, those of all query heads of a group together."""
KEYS = 512
"""Keys of a block of that many rows; a block of fewer rows has more."""
SCORES = 1 << 18
"""Scores that a part's blocks may hold, for each thread."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What the arithmetic inside is done in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Scores:
    """One block of scores, as the softmax takes them, and what their gradient needs."""

    s: torch.Tensor
    """(heads, group · rows, keys); −inf: hidden."""
    capped: torch.Tensor | None
    """tanh of the scores before the cap: 1 − tanh² is the cap's slope."""
    k: torch.Tensor
    v: torch.Tensor
    """K and V of the block, 0 where no row of the block sees the key: 0 · NaN must not reach anything."""


class Part:
    """Some batches and heads of K, with the query heads that use them."""

    def __init__(
        self, call: Call, batches: slice, heads: slice, first_batch: int, dropout: Dropout | None = None
    ) -> None:
        self.dropout = dropout
        self.call, self.batches, self.heads, self.first_batch = call, batches, heads, first_batch
        self.dtype = accumulator(call.q.dtype)
        self.queries, self.keys = call.q.shape[2], call.k.shape[2]
        self.offset = self.keys - self.queries
        self.sides = (batches.stop - batches.start, heads.stop - heads.start, call.group)
        """Batches, heads of K, query heads of each."""
        bias = call.bias
        self.bias = None if bias is None else self.grouped(bias)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, …) as this part's (batches, heads, group, …); a 1 in place of B or H stays 1."""
        heads = x.unflatten(1, (-1, self.call.group)) if x.shape[1] > 1 or self.call.q.shape[1] == 1 else x[:, :, None]
        heads = heads[self.batches] if heads.shape[0] > 1 else heads
        return heads[:, self.heads] if heads.shape[1] > 1 else heads

    def of_rows(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """Rows of a (B, H, queries, D) tensor as a (heads, group · rows, D) matrix."""
        return self.grouped(x)[..., rows, :].to(self.dtype).reshape(-1, self.sides[2] * _size(rows), x.shape[-1])

    def put_rows(self, x: torch.Tensor, rows: slice, matrix: torch.Tensor) -> None:
        """Write a matrix back to where `of_rows` took it from."""
        self.grouped(x)[..., rows, :] = matrix.view(*self.sides, _size(rows), x.shape[-1]).to(x.dtype)

    def of_keys(self, x: torch.Tensor, keys: slice) -> torch.Tensor:
        """Keys of a (B, H_kv, keys, D) tensor as a (heads, keys, D) matrix."""
        return x[self.batches, self.heads, keys].to(self.dtype).reshape(-1, _size(keys), x.shape[-1])

    def put_keys(self, x: torch.Tensor, matrix: torch.Tensor) -> None:
        """Write a matrix of all keys to where `of_keys` would take it from."""
        x[self.batches, self.heads] = matrix.view(*self.sides[:2], self.keys, x.shape[-1]).to(x.dtype)

    def by_row(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """A value for each query head, (H,) or (B, H), as a (heads, group · rows, 1) column."""
        x = self.grouped(x.expand(self.call.q.shape[0], -1)).to(self.dtype)
        return x[..., None].expand(*self.sides, _size(rows)).reshape(-1, self.sides[2] * _size(rows), 1)

    def row_blocks(self) -> Iterator[slice]:
        """Blocks of rows, in order."""
        return _cuts(0, self.queries, _rows_at_once(self.call))

    def key_blocks(self, rows: slice) -> Iterator[slice]:
        """Blocks of the keys that some row of `rows` sees by its position."""
        left, right = self.call.left, self.call.right
        first = 0 if left is None else max(0, rows.start + self.offset - left)
        last = self.keys if right is None else min(self.keys, rows.stop + self.offset + right)
        nothing = left is not None and right is not None and left + right < 0
        return _cuts(first, first if nothing else last, _keys_at_once(self.call))

    def scores(self, q: torch.Tensor, rows: slice, keys: slice) -> Scores | None:
        """The block of scores of `q`, which is scaled already; None if the mask hides it all."""
        call = self.call
        visible, k, v = self._visible(rows, keys), self.of_keys(call.k, keys), self.of_keys(call.v, keys)
        if visible is not None and visible.ndim > 2:
            if not visible.any():
                return None
            unseen = ~visible.any(3, keepdim=True).any(2).expand(*self.sides[:2], 1, _size(keys))
            unseen = unseen.reshape(-1, _size(keys), 1)
            k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        s, capped = q @ k.mT, None
        if call.softcap is not None:
            capped = s.div_(call.softcap).tanh_()
            s = capped * call.softcap
        by_head = s.view(*self.sides, _size(rows), _size(keys))
        if call.slopes is not None:
            slopes = self.grouped(call.slopes).to(self.dtype)[..., None, None]
            by_head.addcmul_(slopes, self._ahead(rows, keys).abs().to(self.dtype), value=-1)
        if self.bias is not None and self.bias.dtype != torch.bool:
            by_head += cut(self.bias, rows, keys)
        if visible is not None:
            by_head.masked_fill_(~visible, -torch.inf)
        return Scores(s, capped, k, v)

    def kept(self, rows: slice, keys: slice) -> torch.Tensor:
        """What dropout leaves of a block, as a bool matrix."""
        call, heads = self.call, self.call.q.shape[1]
        assert self.dropout is not None
        batches = torch.arange(self.batches.start, self.batches.stop, device="cpu") + self.first_batch
        first, last = (head * call.group for head in (self.heads.start, self.heads.stop))
        of_heads = batches[:, None] * heads + torch.arange(first, last, device="cpu")
        of_rows, of_keys = (torch.arange(span.start, span.stop, device="cpu") for span in (rows, keys))
        mask = self.dropout.kept(of_heads, of_rows, of_keys)
        return mask.view(-1, self.sides[2] * _size(rows), _size(keys))

    def _ahead(self, rows: slice, keys: slice) -> torch.Tensor:
        """(rows, keys): how far a key stands after the query."""
        position = torch.arange(rows.start, rows.stop, device="cpu")[:, None] + self.offset
        return torch.arange(keys.start, keys.stop, device="cpu") - position

    def _visible(self, rows: slice, keys: slice) -> torch.Tensor | None:
        """Which keys the rows see, broadcastable to (batches, heads, group, rows, keys); None: all of them."""
        left, right = self.call.left, self.call.right
        if left is not None and rows.stop - 1 + self.offset - left <= keys.start:
            left = None
        if right is not None and keys.stop - 1 <= rows.start + self.offset + right:
            right = None
        visible = None
        if left is not None or right is not None:
            ahead = self._ahead(rows, keys)
            visible = ahead >= -left if left is not None else torch.ones_like(ahead, dtype=torch.bool)
            if right is not None:
                visible &= ahead <= right
        if self.bias is None or self.bias.dtype != torch.bool:
            return visible
        mask = cut(self.bias, rows, keys)
        return mask if visible is None else mask & visible


def cut(x: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    """Rows and keys of a (…, queries, keys) tensor, where a 1 in place of either stays."""
    x = x[..., rows, :] if x.shape[-2] > 1 else x
    return x[..., keys] if x.shape[-1] > 1 else x


def parts(call: Call, first_batch: int) -> Iterator[Part]:
    """The call's parts: several batches where all their heads fit into the budget, else a few heads of one batch."""
    batch, heads = call.k.shape[:2]
    rows, keys = min(_rows_at_once(call), call.q.shape[2]), min(_keys_at_once(call), call.k.shape[2])
    fit = max(1, SCORES * torch.get_num_threads() // max(1, call.group * rows * keys))
    dropout = Dropout(call.seed, call.dropout) if call.dropout and call.seed is not None else None
    for batches in _cuts(0, batch, max(1, fit // heads)):
        for some in _cuts(0, heads, min(fit, heads)):
            yield Part(call, batches, some, first_batch, dropout)


def _rows_at_once(call: Call) -> int:
    return max(1, ROWS // call.group)


def _keys_at_once(call: Call) -> int:
    rows = call.group * min(_rows_at_once(call), call.q.shape[2])
    return KEYS * max(1, ROWS // max(1, rows))


def _cuts(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


def _size(span: slice) -> int:
    size: int = span.stop - span.start
    return size
