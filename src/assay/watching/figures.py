"""The figures of `assay.deviation`, from sums over each head and over all."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.watching.sums import WITH_GOLDEN, WITHOUT_GOLDEN

_Z = 1.959963984540054  # 95% of a normal distribution


def all_finite(sums: Tensor) -> bool:
    """Whether all was that these sums were made of."""
    return bool(torch.stack([x for name, x in _named(sums).items() if name.endswith("_square")]).isfinite().all())


def figures(sums: Tensor, count: Tensor) -> dict[str, list[float]]:
    """Name → a number for each column of `sums`, (names, columns), which went over `count` numbers."""
    given = _named(sums)
    found: dict[str, Tensor] = {"actual_nonfinite": given["actual_nonfinite"]}
    for name in ("difference", "floor", "baseline", "error"):
        if f"{name}_square" in given:
            wrong = given[f"{name}_wrong"]
            found[f"{name}_rmse"] = (given[f"{name}_square"] / (count - wrong)).sqrt()
            found[f"{name}_max"] = torch.where(wrong > 0, torch.inf, given[f"{name}_max"])
    if len(given) == len(WITH_GOLDEN):
        found["baseline_bias"] = given["baseline_sum"] / (count - given["baseline_wrong"])
        found |= _of_error(given, count - given["error_wrong"])
    return dict(zip(found, torch.stack(tuple(found.values())).tolist(), strict=True))


def _named(sums: Tensor) -> dict[str, Tensor]:
    return dict(zip(WITHOUT_GOLDEN if len(sums) == len(WITHOUT_GOLDEN) else WITH_GOLDEN, sums, strict=True))


def _of_error(given: dict[str, Tensor], count: Tensor) -> dict[str, Tensor]:
    wrong, square, actual, golden = (
        given[n] for n in ("error_wrong", "error_square", "actual_square", "golden_square")
    )
    bias = given["error_sum"] / count
    std = (square / count - bias.square()).clamp(min=0.0).sqrt()
    half = _Z * std / (count - 1).clamp(min=1.0).sqrt()
    return {
        "error_mean": given["error_distance"] / count,
        "error_std": std,
        "error_relative": torch.where(square == 0, 0.0, (square / golden).sqrt()),
        "error_bias": bias,
        "error_bias_low": bias - half,
        "error_bias_high": bias + half,
        "error_ulp_max": torch.where(wrong > 0, torch.inf, given["error_ulp_max"]),
        "error_ulp_mean": given["error_ulps"] / count,
        "error_cosine": (actual + golden - square) / 2 / (actual * golden).sqrt(),
        "error_sqnr": torch.where(square == 0, torch.inf, 10 * torch.log10(golden / square)),
        "error_nonfinite": wrong,
        "error_q99": given["error_q99"],
        "error_w1": given["error_w1"],
    }
