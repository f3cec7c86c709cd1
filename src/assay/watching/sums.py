"""Sums over the differences between tensors, head by head; they stay on the device, and `figures` is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from assay.formats.spec import Format
from assay.metrics.ulps import ulp_distance
from assay.watching.kernels import fused
from assay.watching.samples import of_samples, sampled

PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements looked at together: on a CPU so few that they stay in its cache."""
_OF_TWO = ("sum", "wrong", "square")
_ADDED = (
    *(f"{pair}_{name}" for pair in ("difference", "floor", "baseline", "error") for name in _OF_TWO),
    "error_distance", "error_ulps", "actual_square", "golden_square", "actual_nonfinite",
)  # fmt: skip
_LARGEST = ("difference_max", "floor_max", "baseline_max", "error_max", "error_ulp_max")
WITHOUT_GOLDEN = (*_ADDED[:3], *_ADDED[-1:], *_LARGEST[:1])
"""Names: of the differences their sum, their squares, and how often only one of the two is finite (wrong); and how
often the call's is not, whatever the other's is."""
WITH_GOLDEN = (*_ADDED, *_LARGEST, "error_q99", "error_w1")
"""And where golden is there; "floor" is golden rounded once."""
Three = tuple[Tensor, Tensor, Tensor | None]
"""The call's, the other's and, if it was computed, golden: (B, heads, rows, D) each."""
Pair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Makes two tensors ready to be compared; third it says of each row how often only one of them is finite."""


def gathered(threes: Sequence[Three], format: Format, careful: bool = False) -> Tensor:
    """(names, columns): of each three in turn a column for each head, then one for all heads.

    `careful` leaves out what is not finite. Else, where there are no kernels, that spoils the squares.
    """
    sums = _of_tensors(threes, format, careful)
    with_golden = [(x, y) for x, _, y in threes if y is not None]
    if not with_golden:
        return sums
    xs, ys = ([part for x in tensors for part in sampled(x)] for tensors in zip(*with_golden, strict=True))
    return torch.cat((sums, of_samples(xs, ys, careful or always_careful(threes))))


def always_careful(threes: Sequence[Three]) -> bool:
    """Whether kernels look at all, which leave out what is not finite without being told."""
    return all(y is not None and fused(x) and fused(z) for x, z, y in threes)


def _of_tensors(threes: Sequence[Three], format: Format, careful: bool) -> Tensor:
    """All but what is made of samples."""
    exact = [(x, z, y) for x, z, y in threes if y is not None]
    if always_careful(threes):
        from assay.watching import triton_sums

        one_batch = len({len(y) for _, _, y in exact}) == 1
        found = [triton_sums.of_tensors(part, format) for part in ([exact] if one_batch else [[x] for x in exact])]
    else:
        found = [_by_pieces(*each, format, _finite if careful else _as_they_are) for each in threes]
    total, top = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    heads = [x.shape[1] for x, _, _ in threes]
    added = [part for own in total.split(heads, 1) for part in (own, own.sum(1, keepdim=True))]
    largest = [part for own in top.split(heads, 1) for part in (own, own.amax(1, keepdim=True))]
    return torch.cat((torch.cat(added, 1), torch.cat(largest, 1)))


def _by_pieces(x: Tensor, z: Tensor, y: Tensor | None, format: Format, pair: Pair) -> tuple[Tensor, Tensor]:
    x, z = _by_head(x), _by_head(z)
    y = None if y is None else _by_head(y)
    step = max(1, PIECE.get(x.device.type, PIECE["cpu"]) // len(x))
    room = torch.empty(4, len(x), min(step, x.shape[1]), dtype=torch.float64, device=x.device)
    added, largest = [], []
    for start in range(0, x.shape[1], step):
        piece = slice(start, start + step)
        golden_piece = None if y is None else y[:, piece]
        sums, most = _of_piece(x[:, piece], z[:, piece], golden_piece, format, pair, room)
        added.append(torch.stack(sums))
        largest.append(torch.stack(most))
    return torch.stack(added).sum(0), torch.stack(largest).amax(0)


def _of_piece(
    x: Tensor, z: Tensor, y: Tensor | None, format: Format, pair: Pair, room: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """In the order of the names; `room` is memory that stays in the cache from one piece to the next."""
    mine, others, d, free = room[:, :, : x.shape[1]]
    rounded = None if y is None else free.copy_(y.to(x.dtype))
    x, z = mine.copy_(x), others.copy_(z)
    sums, most = [], []
    for one, reference in ((x, z), (rounded, y), (z, y)):
        if one is not None and reference is not None:
            a, b, wrong = pair(one, reference)
            sums += [torch.sub(a, b, out=d).sum(1), wrong, d.square_().sum(1)]
            most.append(d.amax(1).sqrt())
    if y is not None:
        a, b, wrong = pair(x, y)
        sums += [torch.sub(a, b, out=d).sum(1), wrong, torch.square(d, out=free).sum(1), d.abs_().sum(1)]
        ulps = ulp_distance(d, b, format)
        sums += [ulps.sum(1), torch.square(a, out=free).sum(1), torch.square(b, out=free).sum(1)]
        most += [d.amax(1), ulps.amax(1)]
    # Not careful, there is none: it would spoil the squares.
    sums.append((~x.isfinite()).sum(1).double() if pair is _finite else x.new_zeros(len(x)))
    return sums, most


def _as_they_are(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, y, x.new_zeros(len(x))


def _finite(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With 0 where one is not finite."""
    both = x.isfinite() & y.isfinite()
    wrong = ~both & ~((x == y) | (x.isnan() & y.isnan()))
    return torch.where(both, x, 0.0), torch.where(both, y, 0.0), wrong.sum(1).double()


def _by_head(x: Tensor) -> Tensor:
    return x.detach().transpose(0, 1).flatten(1)
