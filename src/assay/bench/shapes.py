"""The problems that are timed, and how much arithmetic each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "forward+backward"]

_FORWARD_AND_BACKWARD = 3.5
"""Times the arithmetic of forward: backward has five products of its size where forward has two."""
_SHORT_KEYS = 512
_FEW_QUERIES = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Attention of (batch, heads, queries, dim) over (batch, KV heads, keys, dim)."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    causal: bool

    @property
    def tokens(self) -> int:
        """Queries of all sequences."""
        return self.batch * self.queries

    @property
    def scores(self) -> int:
        """Elements of the matrix that standard attention writes out."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def input_elements(self) -> int:
        """Of Q, K, V and the gradient of the output."""
        return self.batch * self.dim * (2 * self.heads * self.queries + 2 * self.kv_heads * self.keys)

    @property
    def few_queries(self) -> bool:
        """Whether there are fewer queries than keys, as when text is generated."""
        return self.queries < self.keys

    @property
    def name(self) -> str:
        """As tables and sentences call it."""
        if self.few_queries:
            return f"{self.queries} {'query' if self.queries == 1 else 'queries'} against {self.keys} keys"
        return f"N {self.keys}"

    def flops(self, which: Pass) -> float:
        """Two products of queries × keys × dim; what a causal mask hides is not counted."""
        forward = 4.0 * self.scores * self.dim / (2 if self.causal else 1)
        return forward if which == "forward" else _FORWARD_AND_BACKWARD * forward


def grid(
    *, lengths: Sequence[int], dims: Sequence[int], tokens: int, hidden: int, kv_heads: int | None, causal: bool
) -> list[Shape]:
    """Every length for every dim, with as many sequences as make `tokens` (at least one) and hidden / dim heads.

    Each dim ends with a shape of a few queries against short keys and values, where flash has least to give.
    """
    found = []
    for dim in dict.fromkeys(dims):
        heads = _heads(hidden, dim)
        groups = _kv_heads(heads, kv_heads)

        def shape(
            queries: int, keys: int, causal: bool, dim: int = dim, heads: int = heads, groups: int = groups
        ) -> Shape:
            batch = max(1, tokens // keys)
            return Shape(batch=batch, heads=heads, kv_heads=groups, queries=queries, keys=keys, dim=dim, causal=causal)

        found += [shape(length, length, causal) for length in dict.fromkeys(lengths)]
        short = min(_SHORT_KEYS, *lengths)
        if short > _FEW_QUERIES:
            found.append(shape(_FEW_QUERIES, short, False))  # the last query sees every key
    return found


def _heads(hidden: int, dim: int) -> int:
    if hidden % dim:
        fit = hidden // dim * dim or dim
        raise ValueError(
            f"--hidden must be a multiple of --dim (heads = hidden / dim), got {hidden} and {dim}. Try --hidden {fit}."
        )
    return hidden // dim


def _kv_heads(heads: int, kv_heads: int | None) -> int:
    if kv_heads is not None and heads % kv_heads:
        fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"--kv-heads must divide the heads (hidden / dim = {heads}), got {kv_heads}. Choose of {fit}.")
    return kv_heads or heads
