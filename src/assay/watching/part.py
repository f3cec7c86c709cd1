"""What is compared of a large call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a batch, and of them some heads of K and V with the heads of Q that share them."""

    sequences: slice
    kv_heads: slice
    all_kv_heads: int

    def own(self, x: Tensor) -> Tensor:
        """Of (batch, heads, …), whether these are Q's or K's."""
        return x[self.sequences, self.heads(x.shape[1])]

    def heads(self, count: int) -> slice:
        """Which, of `count` in all."""
        group = count // self.all_kv_heads
        return slice(self.kv_heads.start * group, self.kv_heads.stop * group)

    def first_head(self, count: int) -> int:
        """The number of the first, of `count` that are compared."""
        first: int = self.kv_heads.start * (count // (self.kv_heads.stop - self.kv_heads.start))
        return first


def part(turn: int, batch: int, kv_heads: int, scores_of_head: int, scores: int) -> Part:
    """The turn-th: as many sequences as have so many scores or, where one has more, as many of its heads; at least one.

    `scores_of_head` are those of a head of K and V, in one sequence.
    """
    sequences = max(1, scores // (kv_heads * scores_of_head))
    heads = min(kv_heads, max(1, scores // scores_of_head))
    turn, first_head = divmod(turn, -(-kv_heads // heads))
    first = turn % -(-batch // sequences) * sequences
    first_head *= heads
    return Part(
        sequences=slice(first, min(first + sequences, batch)),
        kv_heads=slice(first_head, min(first_head + heads, kv_heads)),
        all_kv_heads=kv_heads,
    )
