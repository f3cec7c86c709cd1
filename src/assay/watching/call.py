"""One attention call as it was caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from assay.watching.adjusting import unexpanded
from assay.watching.exact import exact
from assay.watching.part import Part, part
from assay.watching.plain import plain
from assay.watching.scores import Scores


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AttentionCall:
    """What went in, in one layout whatever was called: q (B, H, queries, D), k and v (B, KV heads, keys, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    left: int | None = None
    """Keys seen before a row's position, at most; the last row stands beside the last key."""
    right: int | None = None
    """And after it: 0 is causal."""
    bias: Tensor | None = None
    """Bool (False hides) or float (added), broadcast to (B, H, queries, keys)."""
    slopes: Tensor | None = None
    """ALiBi's, (H,) or (B, H)."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """(H,): one more key for each head, without a value."""

    def detached(self) -> AttentionCall:
        """Without gradients."""
        return replace(self, q=self.q.detach(), k=self.k.detach(), v=self.v.detach())

    def in_double(self) -> AttentionCall:
        """The same numbers in FP64."""
        return replace(self, q=self.q.double(), k=self.k.double(), v=self.v.double())

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v."""
        return self.q.dtype

    def plain(self, grad: Tensor | None) -> Sequence[Tensor]:
        """See `plain`."""
        return plain(self, grad)

    def golden(self, grad: Tensor | None) -> tuple[Sequence[Tensor], Scores]:
        """The same in FP64, and what the scores are like."""
        scores = Scores(self.dtype, self.sinks is not None)
        return exact(self, grad, scores), scores

    def some(self, turn: int, scores: int) -> Part:
        """The turn-th part of it that has so many scores."""
        (batch, heads, queries, _), kv_heads = self.q.shape, self.k.shape[1]
        return part(turn, batch, kv_heads, heads // kv_heads * queries * self.k.shape[2], scores)

    def of(self, part: Part) -> AttentionCall:
        """Only this part."""
        heads = part.heads(self.q.shape[1])

        def own(x: Tensor | None, dims: int) -> Tensor | None:
            """Of what has `dims` dimensions, (batch, heads, …), if it is not the same for all; or fewer of the last."""
            if x is None:
                return None
            for dim, which in ((x.dim() - dims, part.sequences), (x.dim() - dims + 1, heads)):
                if dim >= 0 and x.shape[dim] > 1:
                    x = x.narrow(dim, which.start, which.stop - which.start)
            return x

        q, k, v = (part.own(x) for x in (self.q, self.k, self.v))
        return replace(
            self, q=q, k=k, v=v, bias=own(self.bias, 4), slopes=own(self.slopes, 2), sinks=own(self.sinks, 2)
        )

    def gives(self, x: Tensor) -> bool:
        """Whether `x` can be its output."""
        return x.shape == (*self.q.shape[:3], self.v.shape[3])

    def columns(self) -> dict[str, Any]:
        """What rows say of it."""
        batch, heads, queries, dim = self.q.shape
        return {
            "batch": batch, "heads": heads, "kv_heads": self.k.shape[1], "queries": queries, "keys": self.k.shape[2],
            "dim": dim, "causal": self.right is not None, "masked": self.bias is not None,
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """What it takes to replay it, with `notes`."""
        bias = None if self.bias is None else unexpanded(self.bias)
        found = {"q": self.q, "k": self.k, "v": self.v, "bias": bias, "alibi_slopes": self.slopes, "sinks": self.sinks}
        return {name: x for name, x in found.items() if x is not None}

    def notes(self) -> dict[str, str]:
        """The numbers among its arguments."""
        found = {"scale": self.scale, "left": self.left, "right": self.right, "softcap": self.softcap}
        return {name: repr(value) for name, value in found.items() if value is not None}
