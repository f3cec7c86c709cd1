"""flash-attn's calls for packed sequences, whose keys lie one after the other or in pages.

Its boundaries may end before the packed length, a padded tail behind them: what is there is not read, and its results
are those of rows that see no key. Traced code cannot know of a tail, and the operator refuses it there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from assay.flash import checks
from assay.flash.attention import flash_attention
from assay.flash.compat_checks import PACKED, check_both_boundaries, check_dim, used, values
from assay.flash.decode import attention_with_cache


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output (all lengths, H, D) and LSE (H, all lengths)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dim(name, x, 3, PACKED)
    if len(k) != len(v):
        raise ValueError(f"k and v must have one packed length, got {len(k)} and {len(v)}.")
    cu_q, cu_k = check_both_boundaries(cu_q, cu_k, q)
    rows, of_q = len(q), values(cu_q)
    of_k = of_q if cu_k is cu_q else values(cu_k)
    q, k, v = (used(x, of).transpose(0, 1)[None] for x, of in ((q, of_q), (k, of_k), (v, of_k)))
    out, lse = flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options)
    return _with_tail(out[0].transpose(0, 1), lse[0], rows)


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    most: int,
    table: Tensor,
    dropout_p: float,
    deterministic: bool,
    scores: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The same for keys in pages, and sequences with `most` queries at most."""
    check_dim("q", q, 3, PACKED)
    for name, x in (("k", k), ("v", v)):
        check_dim(name, x, 4, "(pages, page size, KV heads, head dimension) with block_table")
    cu_q, cu_k = check_both_boundaries(cu_q, cu_k, q)
    sequences, rows = len(cu_q) - 1, len(q)
    _check_pages(q, k, v, table, sequences)
    of_q, of_k = values(cu_q), values(cu_k)
    q = used(q, of_q)
    if of_q is not None and of_k is not None:
        _check_values(of_q, of_k, len(q), most)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if most * sequences == len(q) and dropout_p == 0 and not needs_gradient:
        out, lse = _equal_lengths(q, k, v, cu_k, table, scores)
    else:
        k, v = _unpaged(k, v, cu_k, of_k, table)
        options = scores | {"dropout_p": dropout_p, "deterministic": deterministic}
        out, lse = attend_packed(q, k, v, cu_q, cu_k, **options)
    return _with_tail(out, lse, rows)


def _check_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sequences: int) -> None:
    """Shapes, dtypes and devices: those of one query stand for all. Autocast makes the dtypes one later."""
    one = q[:1].to(k.dtype) if torch.is_autocast_enabled(q.device.type) else q[:1]
    queries = one.transpose(0, 1)[None].expand(sequences, -1, -1, -1)
    checks.check_cache(queries, k.transpose(1, 2), v.transpose(1, 2), table)


def _check_values(of_q: list[int], of_k: list[int], rows: int, most: int) -> None:
    """Boundaries in order, and no sequence with more queries than `most`."""
    checks.check_boundaries("cu_seqlens_q", torch.tensor(of_q, device="cpu"), rows)
    checks.check_boundaries("cu_seqlens_k", torch.tensor(of_k, device="cpu"), of_k[-1])
    longest = max(after - before for before, after in pairwise(of_q))
    if longest > most:
        raise ValueError(f"max_seqlen_q must be at least the longest sequence's queries, {longest}, got {most}.")


def _equal_lengths(
    q: Tensor, k: Tensor, v: Tensor, cu_k: Tensor, table: Tensor, scores: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Packed queries of sequences that have as many each, over pages."""
    batch = len(cu_k) - 1
    queries = q.unflatten(0, (batch, len(q) // batch)).transpose(1, 2)
    out, lse = attention_with_cache(
        queries, k.transpose(1, 2), v.transpose(1, 2), lengths=cu_k.diff(), block_table=table, return_lse=True, **scores
    )
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)


def _unpaged(k: Tensor, v: Tensor, cu_k: Tensor, of_k: list[int] | None, table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all sequences one after the other, out of their pages."""
    pages, size = k.shape[:2]
    if of_k is not None:
        checks.check_cache_values(torch.tensor(of_k, device="cpu").diff(), table, table.shape[1] * size, pages, size)
    row = torch.arange(int(cu_k[-1]) if of_k is None else of_k[-1], device=k.device)
    sequence = torch.bucketize(row, cu_k[1:], right=True)  # how many end before it
    place = row - cu_k[sequence]
    page = table[sequence, place // size].long()
    return k[page, place % size], v[page, place % size]


def _with_tail(out: Tensor, lse: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """As many rows as there were queries: 0, and an LSE of −inf, behind the last sequence."""
    tail = rows - len(out)
    if tail == 0:
        return out, lse
    pad = torch.nn.functional.pad
    return pad(out, (0, 0, 0, 0, 0, tail)), pad(lse, (0, tail), value=-torch.inf)
