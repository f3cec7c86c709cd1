"""Which keys a query sees, and what is added to its scores.

`causal` and `window` are aligned bottom-right (as flash-attention's): the last query sees the last key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Window = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Masking:
    """Causal, window, ALiBi and bias of one attention call."""

    queries: int
    """Query length."""
    keys: int
    """Key length."""
    causal: bool = False
    """Whether a query sees only keys up to its own position."""
    window: Window | None = None
    """(left, right): how many keys before and after its own position a query sees; None on a side: all."""
    bias: torch.Tensor | None = None
    """Added to the scaled scores (float), or which keys are seen (bool, True = seen); (B, H, Nq, Nk)."""
    alibi_slopes: torch.Tensor | None = None
    """(B, H): slope · distance is subtracted from the scaled scores."""

    @property
    def is_banded(self) -> bool:
        """Whether the positions alone hide some keys."""
        return self.causal or self.window is not None

    @property
    def offset(self) -> int:
        """Position of query 0 among the keys."""
        return self.keys - self.queries

    def first_key(self, query: int) -> int:
        """The first key that `query` sees."""
        left = self.window[0] if self.window else None
        return 0 if left is None else max(0, query + self.offset - left)

    def last_key(self, query: int) -> int:
        """One past the last key that `query` sees."""
        right = self.window[1] if self.window else None
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return self.keys if right is None else max(0, min(self.keys, query + self.offset + right + 1))

    def key_range(self, first: int, last: int) -> tuple[int, int]:
        """Keys seen by any of the queries first..last-1, as a range (both ends move with the query)."""
        return self.first_key(first), self.last_key(last - 1)

    def hidden(self, rows: slice, cols: slice, device: torch.device) -> torch.Tensor | None:
        """(rows, cols): True where the band hides a key from a query; None when it hides nothing there."""
        if self.first_key(rows.stop - 1) <= cols.start and cols.stop <= self.last_key(rows.start):
            return None
        position = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.offset
        ahead = torch.arange(cols.start, cols.stop, device=device) - position
        left, right = self.window or (None, None)
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if self.causal:
            hidden |= ahead > 0
        if left is not None:
            hidden |= ahead < -left
        if right is not None:
            hidden |= ahead > right
        return hidden

    def distances(self, rows: slice, cols: slice, device: torch.device) -> torch.Tensor:
        """(rows, cols): |query position − key position| in FP64, what ALiBi multiplies."""
        queries = torch.arange(rows.start, rows.stop, device=device, dtype=torch.float64) + self.offset
        keys = torch.arange(cols.start, cols.stop, device=device, dtype=torch.float64)
        return (queries[:, None] - keys).abs()
