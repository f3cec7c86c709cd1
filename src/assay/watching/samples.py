"""Figures that need sorting, from a sample: a quantile of the errors, and W1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

SAMPLE = 1 << 12
"""Elements of a row, evenly spaced: sorting must stay cheaper than attention."""
Pair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Makes two tensors ready to be compared; third it says of each row how often only one of them is finite."""


def sampled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of a tensor (B, heads, rows, D): of each head, (heads, some), and of all heads, (1, some)."""
    runs = x.detach().transpose(0, 1).flatten(2)
    _, batch, run = runs.shape
    own = runs[:, :, :: _step(batch * run)].flatten(1)  # nothing but the sample is touched
    return own, own.flatten()[None, :: _step(own.numel())]


def _step(size: int) -> int:
    """Odd: D is mostly a power of two, and every feature is to be met."""
    return math.ceil(size / SAMPLE) | 1


def of_samples(x: Sequence[Tensor], y: Sequence[Tensor], pair: Pair) -> Tensor:
    """(2, rows of all): the quantile and W1 of each row. Rows of one length go together: many cost a GPU as few."""
    found: dict[int, Tensor] = {}
    for length in {each.shape[1] for each in x}:
        which = [number for number, each in enumerate(x) if each.shape[1] == length]
        a, b = (torch.cat([tensors[number] for number in which]) for tensors in (x, y))
        narrow = torch.promote_types(a.dtype, torch.float32)  # sorted faster
        a, b = pair(a.double(), b)[:2]
        parts = torch.stack((q99(a, b), w1(a.to(narrow), b))).split([len(x[number]) for number in which], 1)
        found |= zip(which, parts, strict=True)
    return torch.cat([found[number] for number in range(len(x))], 1)


def q99(x: Tensor, y: Tensor) -> Tensor:
    """Of |x - y|, row by row; as torch.quantile, which sorts all of it."""
    distance = (x - y).abs_()
    rank = 0.99 * (distance.shape[1] - 1)
    below = int(rank)
    top = distance.topk(distance.shape[1] - below, dim=1).values
    return top[:, -1].lerp(top[:, max(0, top.shape[1] - 2)], rank - below)


def w1(x: Tensor, y: Tensor) -> Tensor:
    """Between the values of each row of one and of the other."""
    if x.device.type == "cpu":  # three times as fast as torch's
        a, b = (torch.from_numpy(np.sort(each.numpy(), axis=1)) for each in (x, y))
    else:
        a, b = torch.cat((x.double(), y)).sort(1).values.chunk(2)
    return (a.double() - b).abs_().mean(1)
