"""What the scores of a call are like: their range, how spread the attention is, how often two keys tie for the most."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.watching.kernels import fused

HIDDEN = -1e30
"""Some masks are the most negative number of a format rather than −inf."""
_BEYOND = 1e300
"""Larger than any score."""


class Scores:
    """Gathers, row by row, while the golden value is computed; show it to `plain` as `look`."""

    def __init__(self, dtype: torch.dtype, sinks: bool = False) -> None:
        self._dtype, self._sinks = dtype, sinks
        self._found: list[Tensor] = []

    def __call__(self, s: Tensor, p: Tensor) -> None:
        """Some rows of all heads, in FP64; `s` is overwritten."""
        if fused(s) and not self._sinks:
            from assay.watching import triton_scores

            self._found.append(triton_scores.of_rows(s, self._dtype, HIDDEN))
        else:
            self._found.append(of_rows(s, p, self._dtype))

    def add(self, found: Tensor) -> None:
        """What somebody else has found as `of_rows` does."""
        self._found.append(found)

    def gathered(self) -> Tensor:
        """(4, heads), still on the device, for `figures`."""
        found = torch.cat(self._found, -1)
        entropy, tied = found[2:].mean((1, 3))
        return torch.stack((found[0].amin((0, 2)), found[1].amax((0, 2)), entropy, tied))

    @staticmethod
    def figures(gathered: Tensor) -> dict[str, list[float]]:
        """Column → one number for each head, then one for all."""
        low, high, entropy, tied = gathered.tolist()
        return {
            "logit_min": [*low, min(low)],
            "logit_max": [*high, max(high)],
            "entropy": [*entropy, sum(entropy) / len(entropy)],
            "tied": [*tied, sum(tied) / len(tied)],
        }


def of_rows(s: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """(4, B, H, rows): the lowest visible score, the highest, the entropy, whether the highest is shared in `dtype`."""
    most = s.amax(-1)
    sees = most > HIDDEN
    # In the format's own bits, widened: in place, comparing costs a fifth.
    wide = torch.promote_types(dtype, torch.float32)
    rounded = s.to(dtype, copy=True).to(wide)
    ties = rounded.eq_(most.to(dtype).to(wide)[..., None]).sum(-1)
    torch.threshold_(s, HIDDEN, _BEYOND)
    low = s.amin(-1)
    low = torch.where(low == _BEYOND, torch.inf, low)
    return torch.stack((low, most, _entropy(most, sees, s, p), (sees & (ties > 1)).double()))


def _entropy(most: Tensor, sees: Tensor, s: Tensor, p: Tensor) -> Tensor:
    """−Σ p log p of each row, with log p = s − log Σ exp s: one logarithm a row. `s` is overwritten."""
    gap = -p.amax(-1).clamp(min=torch.finfo(p.dtype).tiny).log()  # log Σ exp s − the largest s
    total = p.sum(-1)  # 1, without sinks
    found = (most + gap) * total - s.mul_(p).sum(-1)
    return torch.where(sees, found, gap * total).clamp(min=0.0)
