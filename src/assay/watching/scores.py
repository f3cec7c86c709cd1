"""What the scores of a call are like: their range, how spread the attention is, how often two keys tie for the most."""

from __future__ import annotations

import torch
from torch import Tensor

_HIDDEN = -1e30
"""Some masks are the most negative number of a format rather than −inf."""


class Scores:
    """Gathers, head by head, while the golden value is computed; show it to `plain` as `look`."""

    def __init__(self, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._low = torch.full((heads,), torch.inf, dtype=torch.float64, device=device)
        self._high = -self._low
        self._entropy, self._tied = torch.zeros_like(self._low), torch.zeros_like(self._low)
        self._rows = 0

    def __call__(self, s: Tensor, p: Tensor) -> None:
        """Some rows of all heads, in FP64."""
        seen = s.masked_fill(s < _HIDDEN, torch.inf)
        self._low = torch.minimum(self._low, seen.amin((0, 2, 3)))
        self._high = torch.maximum(self._high, s.amax((0, 2, 3)))
        self._entropy += torch.special.entr(p).sum(-1).sum((0, 2))
        rounded = s.to(self._dtype)  # as the call's own format tells them apart
        most = rounded.amax(-1, keepdim=True)
        self._tied += (((rounded == most).sum(-1) > 1) & (most[..., 0] > _HIDDEN)).double().sum((0, 2))
        self._rows += s.shape[0] * s.shape[2]

    def figures(self) -> dict[str, list[float]]:
        """Column → one number for each head, then one for all."""
        rows = max(1, self._rows)
        low, high, entropy, tied = torch.stack((self._low, self._high, self._entropy, self._tied)).tolist()
        heads = len(low)
        return {
            "logit_min": [*low, min(low)],
            "logit_max": [*high, max(high)],
            "entropy": [*(x / rows for x in entropy), sum(entropy) / rows / heads],
            "tied": [*(x / rows for x in tied), sum(tied) / rows / heads],
        }
