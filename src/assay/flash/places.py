"""Which sequence each tile of packed rows belongs to."""

from __future__ import annotations

import torch
import triton
from torch.utils.weak import WeakTensorKeyDictionary

from assay.flash.kernels.places import count_places

_KNOWN = WeakTensorKeyDictionary()


def places(cu: torch.Tensor, most: int, size: int) -> torch.Tensor:
    """Of packed tiles: counted once for all layers of a model.

    But a captured graph may be replayed with other lengths, so it counts again.
    """
    if not cu.is_cuda or torch.cuda.is_current_stream_capturing() or cu.is_inference():
        return _count_places(cu, most, size)
    state = cu._version, torch.cuda.current_stream(cu.device)
    known: dict[int, tuple[object, torch.Tensor]] = _KNOWN.setdefault(cu, {})
    if size not in known or known[size][0] != state:
        known[size] = (state, _count_places(cu, most, size))
    return known[size][1]


def _count_places(cu: torch.Tensor, most: int, size: int) -> torch.Tensor:
    """Packed: how many blocks of so many rows there are, then each one's sequence and number there; no host read."""
    found = torch.empty(1 + 2 * most, dtype=torch.int32, device=cu.device)
    count_places[(triton.cdiv(most, 64),)](cu, found, len(cu) - 1, most, size, 64, 128)
    return found
