"""flash-attn's call for decoding: new keys are written into the cache, then the new queries attend over it.

Its caches, (B, N, H, D), may be addressed in three ways: by a table of pages; by `cache_batch_idx`, the row of a cache
that a sequence has; and by `cache_leftpad`, where in that row it begins. All are tables of pages for our kernel: of
the given size, of a whole row, and of one key.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from assay.flash import checks
from assay.flash.compat_checks import check_dim, check_integers, readable, values
from assay.flash.decode import attention_with_cache, checked_options
from assay.flash.rotary import Rotary, check_rotary, rotated


class Cache:
    """Where the keys of each sequence are."""

    def __init__(
        self, k: Tensor, v: Tensor, batch: int, table: Tensor | None, rows: Tensor | None, leftpad: Tensor | None
    ) -> None:
        if table is not None and (rows is not None or leftpad is not None):
            raise ValueError(
                "block_table excludes cache_batch_idx and cache_leftpad: put the pages of those sequences into the "
                "table, and begin each with a page of its own."
            )
        for name, x in (("cache_batch_idx", rows), ("cache_leftpad", leftpad)):
            if x is not None:
                check_integers(name, x, f"(batch,) = ({batch},)", k.device, batch)
        self.k, self.v, self.paged = k, v, table is not None
        if table is None and rows is None:
            self.k, self.v = k[:batch], v[:batch]  # a cache may have room for more sequences
        self.table = table if table is not None else None if rows is None else checks.as_int32(rows)[:, None]
        self.rows, self.leftpad = rows, leftpad

    @property
    def page(self) -> int:
        """Keys in a page; not paged: in a row."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        return self.page * (self.table.shape[1] if self.paged and self.table is not None else 1)

    def append(self, k: Tensor, v: Tensor, first: Tensor | int) -> None:
        """Write k and v (B, new, H_kv, D) in place, from position `first` of each sequence."""
        start = first[:, None] if isinstance(first, Tensor) else first
        places = (torch.arange(k.shape[1], device=k.device) + start).expand(k.shape[0], -1)
        if self.table is None:
            pages = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(places)
        else:
            pages = self.table.gather(1, places // self.page).long()
        with torch.no_grad():
            self.k.index_put_((pages, places % self.page), k)
            self.v.index_put_((pages, places % self.page), v)

    def read(self, lengths: Tensor | int) -> tuple[Tensor, Tensor, Tensor | int, Tensor | None]:
        """K, V (heads before keys), lengths and table, as `attention_with_cache` takes them."""
        k, v, table = self.k, self.v, self.table
        if self.leftpad is not None:
            first = checks.as_int32(self.leftpad)
            rows = torch.arange(len(first), device=k.device, dtype=torch.int32)[:, None] if table is None else table
            ahead = first[:, None] + torch.arange(self.page, device=k.device, dtype=torch.int32)
            table = rows * self.page + ahead.clamp_(max=self.page - 1)
            k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in (k, v))
            lengths = lengths - first
        return k.transpose(1, 2), v.transpose(1, 2), lengths, table


def attend_with_new(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: Cache,
    lengths: Tensor | int | None,
    rotary: Rotary | None,
    splits: int | None,
    scores: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Output (B, N, H, D) and LSE (B, H, N) of q, over the cache with k and v appended to it."""
    checks.check_cache(q.transpose(1, 2), cache.k.transpose(1, 2), cache.v.transpose(1, 2), cache.table)
    checked_options(q.transpose(1, 2), **scores, splits=splits)  # refused before anything is written
    lengths = _check_lengths(lengths, cache, q.shape[0])
    if k is not None or v is not None:
        q, lengths = _append(q, k, v, cache, lengths, rotary, in_order=scores["causal"] or scores["window"] is not None)
    elif rotary is not None:
        raise ValueError("rotary_cos and rotary_sin need k and v: what is in the cache has its position already.")
    else:
        _check_values(cache.capacity if lengths is None else lengths, 0, cache, q.shape[0])
    k_all, v_all, lengths, table = cache.read(cache.capacity if lengths is None else lengths)
    out, lse = attention_with_cache(
        q.transpose(1, 2), k_all, v_all, lengths=lengths, block_table=table, splits=splits, return_lse=True, **scores
    )
    return out.transpose(1, 2), lse


def _append(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: Cache,
    lengths: Tensor | int | None,
    rotary: Rotary | None,
    *,
    in_order: bool,
) -> tuple[Tensor, Tensor | int]:
    """Rotate q and k, put k and v into the cache: q, and how many keys there are then."""
    _check_new(k, v, cache, q.shape[0])
    assert k is not None
    assert v is not None
    if lengths is None:
        raise ValueError("k and v need cache_seqlens: how many keys each sequence has, after which they are written.")
    if rotary is not None:
        check_rotary(rotary, q.shape[3], q.device)
        if rotary.cos.shape[0] < cache.capacity:
            raise ValueError(
                f"rotary_cos and rotary_sin must have a row for every position in the cache, {cache.capacity}, "
                f"got {rotary.cos.shape[0]}. Compute longer tables."
            )
    filled = lengths + k.shape[1]
    _check_values(filled, k.shape[1], cache, q.shape[0])
    if rotary is not None:
        k = rotated(k.transpose(1, 2), rotary, lengths).transpose(1, 2)
        # Without an order all the queries stand at the first new position: rows of one sequence, if told as heads.
        rows = q if in_order else q.flatten(1, 2)[:, None]
        q = rotated(rows.transpose(1, 2), rotary, lengths).transpose(1, 2).reshape(q.shape)
    cache.append(k, v, lengths)
    return q, filled


def _check_new(k: Tensor | None, v: Tensor | None, cache: Cache, batch: int) -> None:
    """Both or neither, and as the cache holds them."""
    if k is None or v is None:
        raise ValueError("k and v must be given together, or neither: a key in the cache has a value.")
    for name, x, held in (("k", k, cache.k), ("v", v, cache.v)):
        check_dim(name, x, 4, "(batch, new keys, KV heads, head dimension)")
        if (x.shape[0], *x.shape[2:]) != (batch, *held.shape[2:]) or x.shape[1] != k.shape[1]:
            raise ValueError(
                f"{name} must be (batch, new keys, KV heads, head dimension) = ({batch}, {k.shape[1]}, "
                f"{held.shape[2]}, {held.shape[3]}), got {tuple(x.shape)}."
            )
        if any(step == 0 for step, size in zip(held.stride(), held.shape, strict=True) if size > 1):
            raise ValueError(
                f"{name}_cache must have a place in memory for each of its numbers, since {name} is written to it; got "
                f"strides {held.stride()} of shape {tuple(held.shape)}. Use .contiguous() of what was expanded."
            )
        if x.dtype != held.dtype or x.device != held.device:
            raise ValueError(
                f"{name} must have the dtype and device of {name}_cache, {held.dtype} on {held.device}; "
                f"got {x.dtype} on {x.device}."
            )


def _check_lengths(lengths: Tensor | int | None, cache: Cache, batch: int) -> Tensor | int | None:
    """As int32, a number or None; a tensor's values are checked before they are used."""
    if isinstance(lengths, Tensor):
        check_integers("cache_seqlens", lengths, f"(batch,) = ({batch},)", cache.k.device, batch)
        return checks.as_int32(lengths)
    if lengths is None:
        return None
    if isinstance(lengths, bool) or not isinstance(lengths, int | Integral):
        raise ValueError(
            f"cache_seqlens must be an int32 tensor of shape (batch,) = ({batch},) or a whole number, got {lengths!r}."
        )
    return int(lengths)


def _check_values(filled: Tensor | int, new: int, cache: Cache, batch: int) -> None:
    """Before anything is written: that lengths are not below 0, the new keys fit, and sequences begin before they end.

    Of tensors, traced code and a CUDA graph that is captured cannot look at the values.
    """
    if isinstance(filled, int):
        _check_room(filled, new, cache.capacity, "")
    if not readable(cache.k):
        return
    counts = [filled] * batch if isinstance(filled, int) else values(filled) or []
    for b, count in enumerate(counts):
        _check_room(count, new, cache.capacity, f" for sequence {b}")
    writers: dict[int, int] = {}
    for b, row in enumerate([] if cache.rows is None else values(cache.rows) or []):
        if not 0 <= row < len(cache.k):
            raise ValueError(
                f"cache_batch_idx must be 0 to {len(cache.k) - 1}, a row of the cache; got {row} for sequence {b}."
            )
        if writers.setdefault(row, b) != b and new:
            raise ValueError(
                f"cache_batch_idx must be a row of its own for each sequence, since keys are written to it; got {row} "
                f"for sequences {writers[row]} and {b}."
            )
    first = [] if cache.leftpad is None else values(cache.leftpad) or []
    for b, (start, count) in enumerate(zip(first, counts, strict=False)):
        if not 0 <= start <= count:
            raise ValueError(
                f"cache_leftpad must be 0 to the length of its sequence with k, {count}, got {start} for sequence {b}."
            )
    if new:
        lengths = torch.tensor(counts, device="cpu")
        checks.check_cache_values(lengths, cache.table, cache.capacity, cache.k.shape[0], cache.page)


def _check_room(filled: int, new: int, capacity: int, where: str) -> None:
    if not new <= filled <= capacity:
        raise ValueError(
            f"cache_seqlens must be 0 to {capacity - new}: the cache has a capacity of {capacity}, and {new} keys are "
            f"new; got {filled - new}{where}. Take a larger cache (with block_table: a wider table), or fewer keys."
        )
