"""All that separates two tensors, for every head at once and for all heads together.

The figures of `assay.deviation`, from sums over each head that add up to those of the whole. Quantiles and W1 are those
of at most `SAMPLE` elements, evenly spaced: sorting must stay cheaper than attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from assay.formats.spec import Format
from assay.metrics.ulps import ulp_distance

SAMPLE = 1 << 12
_Z = 1.959963984540054  # 95% of a normal distribution


def figures(actual: Tensor, reference: Tensor, format: Format) -> dict[str, list[float]]:
    """Name → one number for each head, then one for all; `actual` and `reference` are (B, heads, rows, D)."""
    x, y, d, wrong = _by_head(actual, reference)
    ulps = ulp_distance(d.abs().flatten(), y.flatten(), format).view_as(d)
    count, square, bias = _basic(d, wrong)
    own, norm, product, distance, ulp = map(
        _added, (x.square().sum(1), y.square().sum(1), (x * y).sum(1), d.abs().sum(1), ulps.sum(1))
    )
    std = (square / count - bias.square()).clamp(min=0.0).sqrt()
    half = _Z * std / (count - 1).clamp(min=1.0).sqrt()
    found = {
        "max": _most(d.abs(), wrong),
        "mean": distance / count,
        "std": std,
        "rmse": (square / count).sqrt(),
        "relative": torch.where(square == 0, 0.0, (square / norm).sqrt()),
        "bias": bias,
        "bias_low": bias - half,
        "bias_high": bias + half,
        "ulp_max": _most(ulps, wrong),
        "ulp_mean": ulp / count,
        "cosine": product / (own * norm).sqrt(),
        "sqnr": torch.where(square == 0, torch.inf, 10 * torch.log10(norm / square)),
        "nonfinite": _added(wrong.double()),
        "q99": torch.cat((_q99(d), _q99(d.flatten()[None]))),
        "w1": torch.cat((_w1(x, y), _w1(x.flatten()[None], y.flatten()[None]))),
    }
    return dict(zip(found, torch.stack(tuple(found.values())).tolist(), strict=True))


def brief(actual: Tensor, reference: Tensor) -> dict[str, list[float]]:
    """Only "max", "rmse" and "bias"."""
    _, _, d, wrong = _by_head(actual, reference)
    count, square, bias = _basic(d, wrong)
    most, rmse, lean = torch.stack((_most(d.abs(), wrong), (square / count).sqrt(), bias)).tolist()
    return {"max": most, "rmse": rmse, "bias": lean}


def _by_head(actual: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both and their difference, (heads, numbers) in FP64, 0 where not finite; and how often only one was not."""
    x, y = (tensor.detach().double().transpose(0, 1).flatten(1) for tensor in (actual, reference))
    d = x - y
    if bool(d.isfinite().all()):  # so are x and y
        return x, y, d, torch.zeros(len(d), dtype=torch.int64, device=d.device)
    finite = x.isfinite() & y.isfinite()
    wrong = (~finite & ~((x == y) | (x.isnan() & y.isnan()))).sum(1)
    x, y, d = (torch.where(finite, each, 0.0) for each in (x, y, d))
    return x, y, d, wrong


def _basic(d: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many numbers, the sum of squares, the mean."""
    count = _added(torch.full_like(d[:, 0], d.shape[1]) - wrong)
    return count, _added(d.square().sum(1)), _added(d.sum(1)) / count


def _added(by_head: Tensor) -> Tensor:
    """One number for each head, then their sum."""
    return torch.cat((by_head, by_head.sum()[None]))


def _most(by_head: Tensor, wrong: Tensor) -> Tensor:
    most = torch.where(wrong > 0, torch.inf, by_head.amax(1))
    return torch.cat((most, most.amax()[None]))


def _sampled(x: Tensor) -> Tensor:
    return x[:, :: max(1, math.ceil(x.shape[1] / SAMPLE))]


def _q99(d: Tensor) -> Tensor:
    return torch.quantile(_sampled(d).abs(), 0.99, dim=1)


def _w1(x: Tensor, y: Tensor) -> Tensor:
    return (_sampled(x).sort(1).values - _sampled(y).sort(1).values).abs().mean(1)
