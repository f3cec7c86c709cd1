"""Figures that need sorting, from a sample: a quantile of the errors, and W1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

SAMPLE = 1 << 12
"""Elements of a row, evenly spaced: sorting must stay cheaper than attention."""


def sampled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of a tensor (B, heads, rows, D): of each head, (heads, some), and of all heads, (1, some)."""
    runs = x.detach().transpose(0, 1).flatten(2)
    _, batch, run = runs.shape
    own = runs[:, :, :: _step(batch * run)].flatten(1)  # nothing but the sample is touched
    return own, own.flatten()[None, :: _step(own.numel())]


def _step(size: int) -> int:
    """Odd: D is mostly a power of two, and every feature is to be met."""
    return math.ceil(size / SAMPLE) | 1


def of_samples(x: Sequence[Tensor], y: Sequence[Tensor], careful: bool) -> Tensor:
    """(2, rows of all): the quantile and W1 of each row; `careful`: with 0 where one is not finite."""
    found: dict[int, Tensor] = {}
    groups = list(_by_length(x, y, careful))
    both = _one_by_one(groups, x[0].dtype) if x[0].device.type == "cpu" else together([(a, b) for _, a, b in groups])
    for (which, _, _), parts in zip(groups, both, strict=True):
        found |= zip(which, parts.split([len(x[number]) for number in which], 1), strict=True)
    return torch.cat([found[number] for number in range(len(x))], 1)


def _by_length(x: Sequence[Tensor], y: Sequence[Tensor], careful: bool) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Those of one length as one: which they are, and both, in FP64."""
    for length in dict.fromkeys(each.shape[1] for each in x):
        which = [number for number, each in enumerate(x) if each.shape[1] == length]
        a, b = (torch.cat([tensors[number] for number in which]).double() for tensors in (x, y))
        if careful:
            both = (a - b).isfinite()  # infinite or NaN where one is
            a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
        yield which, a, b


def _one_by_one(groups: Sequence[tuple[list[int], Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """The first no wider than it must be: it sorts faster."""
    narrow = torch.promote_types(dtype, torch.float32)
    return [torch.stack((q99(a, b), w1(a.to(narrow), b))) for _, a, b in groups]


def together(groups: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """`q99` and `w1` of each two, with one sort for all: it costs a GPU hardly more than one for few rows."""
    longest = max(a.shape[1] for a, _ in groups)
    rows = []
    for a, b in groups:
        three = torch.cat((a, b, (a - b).abs_()))
        missing = longest - a.shape[1]
        rows.append(F.pad(three, (0, missing), value=torch.inf) if missing else three)
    ordered = torch.cat(rows).sort(1).values.split([len(each) for each in rows])
    found = []
    for (first, _), three in zip(groups, ordered, strict=True):
        length = first.shape[1]
        a, b, d = three[:, :length].chunk(3)
        rank = 0.99 * (length - 1)
        below = int(rank)
        quantile = d[:, below].lerp(d[:, min(below + 1, length - 1)], rank - below)
        found.append(torch.stack((quantile, (a - b).abs_().mean(1))))
    return found


def q99(x: Tensor, y: Tensor) -> Tensor:
    """Of |x - y|, row by row; as torch.quantile, which sorts all of it."""
    distance = (x - y).abs_()
    rank = 0.99 * (distance.shape[1] - 1)
    below = int(rank)
    top = distance.topk(distance.shape[1] - below, dim=1).values
    return top[:, -1].lerp(top[:, max(0, top.shape[1] - 2)], rank - below)


def w1(x: Tensor, y: Tensor) -> Tensor:
    """Between the values of each row of one and of the other, on a CPU."""
    a, b = (torch.from_numpy(np.sort(each.numpy(), axis=1)) for each in (x, y))  # three times as fast as torch's
    return (a.double() - b).abs_().mean(1)
