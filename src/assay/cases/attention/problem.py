"""One tiled attention call made ready: inputs rounded, heads flattened, cut into pieces that fit the cache.

Rows do not depend on each other, so a piece takes many rows at once and several blocks of keys; what a literal
double loop does tile by tile happens here in bulk. Tensors are held as (heads, keys, rows): a row's statistics
then lie along the last dimension, where they vectorise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from assay.cases.attention.arithmetic import Arithmetic
from assay.cases.attention.blocks import Block, check_block
from assay.cases.attention.checks import is_number
from assay.cases.attention.masking import Masking
from assay.cases.attention.plan import Plan
from assay.cases.attention.quantization import Quantization, quantize, rotate

Order = Literal["fa1", "fa2", "split_kv"]

LOG2_E = math.log2(math.e)
_ROWS_AT_ONCE = 1024
_TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}  # scores held at a time: the CPU's share of L2


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How attention is cut into tiles, and the tricks played on the way."""

    order: Order = "fa2"
    """"fa1": normalised at every block; "fa2": once at the end; "split_kv": fa2 over parts of the keys, merged."""
    block: Block = (64, 64)
    """(rows, columns) of a tile."""
    reverse_keys: bool = False
    """Whether the blocks of keys are taken from the last to the first in forward, as FA2's kernel does."""
    splits: int = 2
    """How many parts "split_kv" cuts the keys into."""
    exp2: bool = False
    """Whether exponentials are powers of two, log₂e being folded into the scale."""
    lazy_threshold: float | None = None
    """Rescale only when the maximum grew by more than this (in the exponent's unit); None: always."""
    sum_after_cast: bool = False
    """Whether the row sum is taken over P as P·V sees it, rather than before that cast."""
    tie_shift: float | None = None
    """β > 1: where several scores of a block share the maximum m, subtract β·m (m > 0) or 0 (m < 0) instead."""
    probability_shift: int = 0
    """P is scaled up by 2^shift before its cast, and the sum with it (FA3's FP8: 8)."""
    scale_inside: bool = False
    """Whether backward scales each block's dQ and dK before adding it up, rather than the sums at the end."""
    quantization: Quantization | None = None
    """Scale (and rotate) the inputs before rounding them, as FP8 kernels do."""

    def __post_init__(self) -> None:
        check_block(self.block)
        if self.order not in get_args(Order):
            raise ValueError(f"order must be one of {', '.join(get_args(Order))}; got {self.order!r}.")
        for name in ("reverse_keys", "exp2", "sum_after_cast", "scale_inside"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not is_number(self.splits, int) or self.splits < 1:
            raise ValueError(f"splits must be a whole number of at least 1, got {self.splits!r}.")
        if self.lazy_threshold is not None and self.order == "fa1":
            raise ValueError("lazy_threshold needs order='fa2' or 'split_kv': fa1 has no running maximum in P.")
        if self.lazy_threshold is not None and not _is_between(self.lazy_threshold, 0, math.inf):
            raise ValueError(f"lazy_threshold must be at least 0 and finite, got {self.lazy_threshold!r}.")
        if self.tie_shift is not None and not (_is_between(self.tie_shift, 1, math.inf) and self.tie_shift > 1):
            raise ValueError(f"tie_shift (β) must be greater than 1 and finite, got {self.tie_shift!r}.")
        if not is_number(self.probability_shift, int) or not -64 <= self.probability_shift <= 64:
            raise ValueError(
                f"probability_shift must be a whole number from -64 to 64, got {self.probability_shift!r}."
            )
        if self.quantization is not None and not isinstance(self.quantization, Quantization):
            raise ValueError(f"quantization must be a Quantization, got {self.quantization!r}.")


def _is_between(value: object, low: float, high: float) -> bool:
    """Whether `value` is a number with low <= value < high."""
    return is_number(value) and low <= value < high  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Some heads and some rows of them."""

    heads: range
    """Of the flattened query heads."""
    rows: slice
    """Of the queries."""


class Problem:
    """The rounded inputs of one call with everything that computes its scores."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        plan: Plan,
        tiling: Tiling,
        masking: Masking,
        scale: float,
    ) -> None:
        self.plan, self.tiling, self.masking, self.scale = plan, tiling, masking, scale
        self.arithmetic = Arithmetic(plan)
        self.heads_per_batch, self.group = q.shape[1], q.shape[1] // k.shape[1]
        self.q_scale: torch.Tensor | None = None
        self.k_scale: torch.Tensor | None = None
        self.v_scale: torch.Tensor | None = None
        q, k, v = self._enter(q, k, v)
        self.q, self.k, self.v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        # A NaN or inf in V reaches every row of dense attention, also where P is 0: then nothing is skipped.
        self.skips = masking.is_banded and bool(torch.isfinite(self.v).all())

    def _enter(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quantization, fmt = self.tiling.quantization, self.plan.inputs
        if quantization is None:
            return tuple(self.arithmetic.hold(x, fmt).contiguous() for x in (q, k, v))
        q, k, v = (x.to(self.arithmetic.carrier) for x in (q, k, v))
        if quantization.incoherent:
            q, k = rotate(q, quantization.seed), rotate(k, quantization.seed)
        rows, columns = self.tiling.block
        q, q_scale = quantize(q, fmt, quantization.scales, rows)
        k, k_scale = quantize(k, fmt, quantization.scales, columns)
        v, v_scale = quantize(v, fmt, quantization.scales, columns)
        self.q_scale, self.k_scale, self.v_scale = (s.flatten(0, 1) for s in (q_scale, k_scale, v_scale))
        return q, k, v

    def pieces(self) -> Iterator[Piece]:
        """All heads and rows, in pieces whose scores against a few blocks of keys fit the cache."""
        block_rows, columns = self.tiling.block
        heads, queries = self.q.shape[0], self.masking.queries
        if self.skips and self.tiling.order == "fa1":
            # A block hidden from a whole block of rows is skipped, which for fa1 is not the same as adding 0.
            rows = block_rows
        else:
            rows = max(1, _ROWS_AT_ONCE // block_rows) * block_rows
        rows = min(rows, queries)
        together = max(1, self._budget() // (rows * min(self.masking.keys, 8 * columns)))
        for start in range(0, heads, together):
            for row in range(0, queries, rows):
                yield Piece(
                    heads=range(start, min(start + together, heads)),
                    rows=slice(row, min(row + rows, queries)),
                )

    def _budget(self) -> int:
        return _TILE_ELEMENTS["cuda" if self.q.is_cuda else "cpu"]

    def tiles(self, piece: Piece, part: tuple[int, int] = (0, 1)) -> Iterator[tuple[int, int, int]]:
        """(first key, columns of a block, blocks): runs of whole blocks that the rows of `piece` see.

        `part` (i, n) takes the i-th of n equal shares of the blocks.
        """
        columns, keys = self.tiling.block[1], self.masking.keys
        first, last = (0, keys)
        if self.skips:
            first, last = self.masking.key_range(piece.rows.start, piece.rows.stop)
        blocks = -(-keys // columns)
        share = -(-blocks // part[1])
        begin = max(first // columns, part[0] * share)
        end = min(-(-last // columns), (part[0] + 1) * share)
        rows = piece.rows.stop - piece.rows.start
        together = max(1, self._budget() // (len(piece.heads) * rows * columns))
        whole = min(end, keys // columns)
        for block in range(begin, whole, together):
            yield block * columns, columns, min(together, whole - block)
        if begin <= whole < end:
            yield whole * columns, keys - whole * columns, 1

    def of_kv_heads(self, x: torch.Tensor, heads: range) -> torch.Tensor:
        """The key/value heads that these query heads use, one for each."""
        if self.group == 1:
            return x[heads.start : heads.stop]
        first, last = heads.start // self.group, (heads.stop - 1) // self.group
        if first == last:
            return x[first : first + 1].expand(len(heads), *x.shape[1:])
        return x[torch.tensor([h // self.group for h in heads], device=x.device)]

    def scores(self, piece: Piece, cols: slice) -> torch.Tensor:
        """(heads, keys, rows): scaled scores with everything added and hidden keys at −inf."""
        plan, arithmetic = self.plan, self.arithmetic
        q = self.q[piece.heads.start : piece.heads.stop, piece.rows]
        k = self.of_kv_heads(self.k, piece.heads)[:, cols]
        unit = LOG2_E if self.tiling.exp2 else 1.0
        s = arithmetic.dot(k, q.transpose(1, 2), plan.scores)
        factor: torch.Tensor | float = self.scale * unit
        if self.q_scale is not None and self.k_scale is not None:
            q_scale = self.q_scale[piece.heads.start : piece.heads.stop, piece.rows]
            k_scale = self.of_kv_heads(self.k_scale, piece.heads)[:, cols]
            factor = factor * k_scale * q_scale.transpose(1, 2)
        s = arithmetic.apply(plan.scale, torch.mul, s, factor, out=s)
        added, hidden = self._added(piece, cols)
        for term in added:
            s = arithmetic.apply(plan.scale, torch.add, s, _in_units(term, unit))
        return s if hidden is None else s.masked_fill_(hidden, -torch.inf)

    def _added(self, piece: Piece, cols: slice) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """What is added to the scores of a tile, and which of them are hidden; (heads, keys, rows)."""
        masking, device, carrier = self.masking, self.q.device, self.arithmetic.carrier
        added: list[torch.Tensor] = []
        hidden = masking.hidden(piece.rows, cols, device)
        hidden = None if hidden is None else hidden.T
        if masking.alibi_slopes is not None:
            slopes = masking.alibi_slopes.flatten()[piece.heads.start : piece.heads.stop]
            distances = masking.distances(piece.rows, cols, device).T
            added.append((-slopes.double()[:, None, None] * distances).to(carrier))
        if masking.bias is not None:
            tiles = [masking.bias[divmod(h, self.heads_per_batch)][piece.rows, cols].T for h in piece.heads]
            bias = torch.stack(tiles)
            if bias.dtype == torch.bool:
                hidden = ~bias if hidden is None else hidden | ~bias
            else:
                added.append(bias.to(carrier))
        return added, hidden


def _in_units(term: torch.Tensor, unit: float) -> torch.Tensor:
    """term·unit, but the most negative number, a common mask, must not become −inf: such rows still see their keys."""
    largest = torch.finfo(term.dtype).max
    return torch.where(term.isinf(), term, (term * unit).clamp(-largest, largest)) if unit != 1 else term


def without_minus_infinity(maximum: torch.Tensor) -> torch.Tensor:
    """0 for rows that have seen no key yet: −inf − (−inf) would be NaN, −inf − 0 gives P = 0."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)
