"""Sums over the differences between tensors, head by head; they stay on the device, and `figures` is made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from assay.formats.spec import Format
from assay.metrics.ulps import ulp_distance
from assay.watching.samples import q99, sampled, w1

PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements looked at together: on a CPU so few that they stay in its cache."""
_OF_TWO = ("sum", "wrong", "square")
_ADDED = (
    *(f"{pair}_{name}" for pair in ("difference", "floor", "baseline", "error") for name in _OF_TWO),
    "error_distance", "error_ulps", "actual_square", "golden_square",
)  # fmt: skip
_LARGEST = ("difference_max", "floor_max", "baseline_max", "error_max", "error_ulp_max")
WITHOUT_GOLDEN = (*_ADDED[:3], *_LARGEST[:1])
"""Names: of the differences their sum, their squares, and how often only one of the two is finite (wrong)."""
WITH_GOLDEN = (*_ADDED, *_LARGEST, "error_q99", "error_w1")
"""And where golden is there; "floor" is golden rounded once."""
Two = tuple[Tensor, Tensor, Tensor]
"""Tensors to compare, and how often only one of them is finite."""


def gathered(actual: Tensor, other: Tensor, golden: Tensor | None, format: Format, careful: bool = False) -> Tensor:
    """Of tensors (B, heads, rows, D): (names, heads + 1), the last column being for all heads.

    `careful` leaves out what is not finite. Else that spoils the squares.
    """
    pair = _finite if careful else _as_they_are
    x, z = _by_head(actual), _by_head(other)
    y = None if golden is None else _by_head(golden)
    step = max(1, PIECE.get(x.device.type, PIECE["cpu"]) // len(x))
    room = torch.empty(4, len(x), min(step, x.shape[1]), dtype=torch.float64, device=x.device)
    added, largest = [], []
    for start in range(0, x.shape[1], step):
        piece = slice(start, start + step)
        golden_piece = None if y is None else y[:, piece]
        sums, most = _of_piece(x[:, piece], z[:, piece], golden_piece, format, pair, room)
        added.append(torch.stack(sums))
        largest.append(torch.stack(most))
    total, top = torch.stack(added).sum(0), torch.stack(largest).amax(0)
    found = [torch.cat((total, total.sum(1, keepdim=True)), 1), torch.cat((top, top.amax(1, keepdim=True)), 1)]
    if y is not None:
        both = ((x, y), (x.flatten()[None], y.flatten()[None]))
        samples = [pair(sampled(a).double(), sampled(b))[:2] for a, b in both]
        narrow = torch.promote_types(x.dtype, torch.float32)  # sorted faster
        found.append(torch.cat([q99(a, b) for a, b in samples])[None])
        found.append(torch.cat([w1(a.to(narrow), b) for a, b in samples])[None])
    return torch.cat(found)


def _of_piece(
    x: Tensor, z: Tensor, y: Tensor | None, format: Format, pair: Callable[[Tensor, Tensor], Two], room: Tensor
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
    return sums, most


def _as_they_are(x: Tensor, y: Tensor) -> Two:
    return x, y, x.new_zeros(len(x))


def _finite(x: Tensor, y: Tensor) -> Two:
    """With 0 where one is not finite."""
    finite = x.isfinite() & y.isfinite()
    wrong = ~finite & ~((x == y) | (x.isnan() & y.isnan()))
    return torch.where(finite, x, 0.0), torch.where(finite, y, 0.0), wrong.sum(1).double()


def _by_head(x: Tensor) -> Tensor:
    return x.detach().transpose(0, 1).flatten(1)
