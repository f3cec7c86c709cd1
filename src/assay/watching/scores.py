"""What the scores of a call are like: their range, how spread the attention is, how often two keys tie for the most."""

from __future__ import annotations

import torch
from torch import Tensor

_HIDDEN = -1e30
"""Some masks are the most negative number of a format rather than −inf."""
_BEYOND = 1e300
"""Larger than any score."""


class Scores:
    """Gathers, head by head, while the golden value is computed; show it to `plain` as `look`."""

    def __init__(self, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._wide = dtype, torch.promote_types(dtype, torch.float32)
        self._low = torch.full((heads,), torch.inf, dtype=torch.float64, device=device)
        self._high = -self._low
        self._entropy, self._tied = torch.zeros_like(self._low), torch.zeros_like(self._low)
        self._rows = 0

    def __call__(self, s: Tensor, p: Tensor) -> None:
        """Some rows of all heads, in FP64; `s` is overwritten."""
        most = s.amax(-1)
        sees = most > _HIDDEN
        # As the call's own format tells them apart. In place, comparing costs a fifth.
        rounded = s.to(self._dtype, copy=True).to(self._wide)
        ties = rounded.eq_(most.to(self._dtype).to(self._wide)[..., None]).sum(-1)
        self._tied += (sees & (ties > 1)).sum((0, 2))
        self._high = torch.maximum(self._high, most.amax((0, 2)))
        torch.threshold_(s, _HIDDEN, _BEYOND)
        low = s.amin((0, 2, 3))
        self._low = torch.minimum(self._low, torch.where(low == _BEYOND, torch.inf, low))
        self._entropy += _entropy(most, sees, s, p).sum((0, 2))
        self._rows += s.shape[0] * s.shape[2]

    def gathered(self) -> Tensor:
        """(4, heads), still on the device, for `figures`."""
        return torch.stack((self._low, self._high, self._entropy, self._tied))

    def figures(self, gathered: Tensor) -> dict[str, list[float]]:
        """Column → one number for each head, then one for all."""
        low, high, entropy, tied = gathered.tolist()
        heads, rows = len(low), max(1, self._rows)
        return {
            "logit_min": [*low, min(low)],
            "logit_max": [*high, max(high)],
            "entropy": [*(x / rows for x in entropy), sum(entropy) / rows / heads],
            "tied": [*(x / rows for x in tied), sum(tied) / rows / heads],
        }


def _entropy(most: Tensor, sees: Tensor, s: Tensor, p: Tensor) -> Tensor:
    """−Σ p log p of each row, with log p = s − log Σ exp s: one logarithm a row. `s` is overwritten."""
    gap = -p.amax(-1).clamp(min=torch.finfo(p.dtype).tiny).log()  # log Σ exp s − the largest s
    total = p.sum(-1)  # 1, without sinks
    found = (most + gap) * total - s.mul_(p).sum(-1)
    return torch.where(sees, found, gap * total).clamp(min=0.0)
