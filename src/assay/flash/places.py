"""Which sequence each tile of packed rows or keys belongs to."""

from __future__ import annotations

from typing import Literal

import torch
import triton

from assay.flash import replay
from assay.flash.call import Call
from assay.flash.kernels.places import FIELDS, count_places


def places(call: Call, of: Literal["q", "k"], most: int, size: int) -> torch.Tensor | None:
    """Of a packed call's tiles of queries or keys: see `count_places`. Counted once for all kernels of a call.

    Not for several calls: lengths can change unseen, by a captured graph, a collective or a kernel of one's own. Where
    queries and keys have the same lengths, so have their tiles.
    """
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    if cu_q is None or cu_k is None:
        return None
    key = "both" if cu_q is cu_k and call.q.shape[2] == call.k.shape[2] else of, size
    if key not in call.counted:
        call.counted[key] = _count_places(cu_q if of == "q" else cu_k, cu_q, cu_k, most, size)
    return call.counted[key]


def _count_places(cu: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, most: int, size: int) -> torch.Tensor:
    """No host read."""
    found = replay.room((1 + int(FIELDS) * most,), torch.int32, cu.device)
    replay.launch(count_places, (triton.cdiv(most, 64),), cu, cu_q, cu_k, found, len(cu) - 1, most, size, 64, 128)
    return found
