"""Which sequence each tile of packed rows or keys belongs to."""

from __future__ import annotations

import weakref
from typing import Literal

import torch
import triton
from torch.utils.weak import WeakTensorKeyDictionary

from assay.flash.call import Call
from assay.flash.kernels.places import count_places

_KNOWN = WeakTensorKeyDictionary()


def places(call: Call, of: Literal["q", "k"], most: int, size: int) -> torch.Tensor | None:
    """Of a packed call's tiles of queries or keys: see `count_places`. Counted once for all layers of a model.

    But a captured graph may be replayed with other lengths, so each of its calls counts again. Where queries and keys
    have the same lengths, so have their tiles.
    """
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    if cu_q is None or cu_k is None:
        return None
    cu, other = (cu_q, cu_k) if of == "q" else (cu_k, cu_q)
    key = "both" if cu_q is cu_k and call.q.shape[2] == call.k.shape[2] else of, size
    if not cu.is_cuda or torch.cuda.is_current_stream_capturing() or cu.is_inference() or other.is_inference():
        if key not in call.counted:
            call.counted[key] = _count_places(cu, cu_q, cu_k, most, size)
        return call.counted[key]
    state = cu._version, other._version, torch.cuda.current_stream(cu.device)
    known: dict[object, tuple[object, weakref.ref[torch.Tensor], torch.Tensor]] = _KNOWN.setdefault(cu, {})
    found = known.get(key)
    if found is None or found[0] != state or found[1]() is not other:
        found = known[key] = state, weakref.ref(other), _count_places(cu, cu_q, cu_k, most, size)
    return found[2]


def _count_places(cu: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, most: int, size: int) -> torch.Tensor:
    """No host read. Six numbers a tile: see `kernels.places.FIELDS`."""
    found = torch.empty(1 + 6 * most, dtype=torch.int32, device=cu.device)
    count_places[(triton.cdiv(most, 64),)](cu, cu_q, cu_k, found, len(cu) - 1, most, size, 64, 128)
    return found
