"""Several sequences one after the other in one call, each attending within itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.watching.call import AttentionCall
from assay.watching.exact import exact
from assay.watching.plain import plain
from assay.watching.scores import Scores


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PackedCall:
    """What went in: one call for each sequence, of batch 1. Results are (1, heads, all lengths, D)."""

    parts: tuple[AttentionCall, ...]

    def detached(self) -> PackedCall:
        """Without gradients."""
        return PackedCall(parts=tuple(part.detached() for part in self.parts))

    def in_double(self) -> PackedCall:
        """The same numbers in FP64."""
        return PackedCall(parts=tuple(part.in_double() for part in self.parts))

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v."""
        return self.parts[0].dtype

    def each(
        self, grad: Tensor | None, compute: Callable[[AttentionCall, Tensor | None], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """What is computed of each, one after the other: the output and, given its gradient, those of q, k and v."""
        lengths = [part.q.shape[2] for part in self.parts]
        grads = [None] * len(lengths) if grad is None else grad.split(lengths, 2)
        found = [compute(part, own) for part, own in zip(self.parts, grads, strict=True)]
        return [torch.cat(tensors, 2) for tensors in zip(*found, strict=True)]

    def plain(self, grad: Tensor | None) -> Sequence[Tensor]:
        """See `call.plain`."""
        return self.each(grad, plain)

    def golden(self, grad: Tensor | None) -> tuple[Sequence[Tensor], Scores]:
        """The same in FP64, and what the scores of all are like."""
        scores = Scores(self.dtype, any(part.sinks is not None for part in self.parts))
        return self.each(grad, lambda part, own: exact(part, own, scores)), scores

    def gives(self, x: Tensor) -> bool:
        """Whether `x` can be its output."""
        first, rows = self.parts[0], sum(part.q.shape[2] for part in self.parts)
        return x.shape == (1, first.q.shape[1], rows, first.v.shape[3])

    def columns(self) -> dict[str, Any]:
        """What rows say of it: the lengths are those of the longest sequence."""
        return self._longest.columns() | {"batch": len(self.parts)}

    def tensors(self) -> dict[str, Tensor]:
        """What went into the longest sequence."""
        return self._longest.tensors()

    def worst(self, actual: Tensor, other: Tensor, golden: Tensor | None) -> AttentionCall:
        """The sequence whose output has the largest error over the other's, in one of its heads or in all."""
        lengths = torch.tensor([part.q.shape[2] for part in self.parts], device=actual.device)
        if golden is None:
            found = _squares(actual, other, lengths) / lengths
        else:
            mine, theirs, least = (_squares(x, golden, lengths) for x in (actual, other, golden.to(actual.dtype)))
            found = torch.where(mine == 0, 0.0, mine / torch.maximum(theirs, least))
        return self.parts[int(found.nan_to_num(torch.inf, torch.inf).amax(0).argmax())]

    @property
    def _longest(self) -> AttentionCall:
        return max(self.parts, key=lambda part: part.q.shape[2] * part.k.shape[2])


def _squares(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    """(heads and one for all, sequences): sums of the squares of x - y; not finite where only one of them is."""
    a, b = x[0].double(), y[0].double()
    same = (a == b) | (a.isnan() & b.isnan())
    rows = torch.where(same, 0.0, a - b).square().sum(-1)
    which = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)
    sums = rows.new_zeros(len(rows), len(lengths)).index_add_(1, which, rows)
    return torch.cat((sums, sums.sum(0, keepdim=True)))


def packed(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, slopes: Tensor | None, **how: Any
) -> PackedCall | str:
    """The call on (1, heads, all lengths, D); `starts` are where each sequence begins, and the total."""
    rows, keys = starts.tolist(), key_starts.tolist()
    parts = []
    for number in range(len(rows) - 1):
        own, others = slice(rows[number], rows[number + 1]), slice(keys[number], keys[number + 1])
        if own.start == own.stop and others.start == others.stop:
            continue
        if own.start == own.stop or others.start == others.stop:
            return "a sequence without queries, or without keys"
        sloping = slopes if slopes is None or slopes.dim() == 1 else slopes[number : number + 1]
        part = AttentionCall(q=q[:, :, own], k=k[:, :, others], v=v[:, :, others], slopes=sloping, **how)
        parts.append(part)
    return PackedCall(parts=tuple(parts)) if parts else "no sequences"
