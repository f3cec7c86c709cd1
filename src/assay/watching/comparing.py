"""The columns of one caught call: its error and the other's against golden, judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from assay.formats.spec import Format
from assay.results.watch_record import ERROR
from assay.watching.figures import all_finite, figures
from assay.watching.scores import Scores
from assay.watching.sums import gathered

OUTPUT_BUDGET, GRADIENT_BUDGET = 2.0, 3.0
"""How many times the error of the plain computation in the same format a call's may be."""
Columns = dict[str, list[Any]]
"""Column → one value for each head, then one for all."""


def compare(
    actual: Mapping[str, Tensor],
    others: Sequence[Tensor],
    goldens: Sequence[Tensor | None],
    scores: Scores | None,
    format: Format,
) -> dict[str, Columns]:
    """Of each tensor by its name, as three computed it; `scores` is for the output.

    All comes from the device at once, and again only where something is not finite.
    """
    three = list(zip(actual.values(), others, goldens, strict=True))
    sums = torch.cat([gathered(*each, format) for each in three], 1)
    sums, own = _fetched(sums, sums[:0] if scores is None else scores.gathered())
    if not all_finite(sums):
        sums = torch.cat([gathered(*each, format, careful=True) for each in three], 1).cpu()
    counts = [torch.tensor([*[x.numel() // x.shape[1]] * x.shape[1], x.numel()]) for x in actual.values()]
    found = figures(sums, torch.cat(counts).double())
    columns: dict[str, Columns] = {}
    begin = 0
    for name, count in zip(actual, counts, strict=True):
        end = begin + len(count)
        part = {figure: values[begin:end] for figure, values in found.items()}
        columns[name] = _judged(part, OUTPUT_BUDGET if name == "output" else GRADIENT_BUDGET)
        begin = end
    if scores is not None:
        columns["output"] |= scores.figures(own)
    return columns


def _fetched(*tensors: Tensor) -> list[Tensor]:
    """The same on the CPU, in one transfer."""
    numbers = torch.cat([x.flatten() for x in tensors]).cpu()
    return [each.view(x.shape) for each, x in zip(numbers.split([x.numel() for x in tensors]), tensors, strict=True)]


def _judged(found: dict[str, list[float]], budget: float) -> Columns:
    columns: Columns = {name: found[name] for name in ("difference_max", "difference_rmse")}
    if "error_rmse" not in found:
        return columns
    columns |= {f"error_{name}": found[f"error_{name}"] for name in ERROR}
    columns |= {f"baseline_{name}": found[f"baseline_{name}"] for name in ("max", "rmse", "bias")}
    for name in ("max", "rmse"):
        # A baseline may happen to be nearly exact. Nobody is nearer than golden rounded once.
        three = (found[f"{whose}_{name}"] for whose in ("error", "baseline", "floor"))
        columns[f"ratio_{name}"] = [
            _ratio(mine, max(theirs, least)) for mine, theirs, least in zip(*three, strict=True)
        ]
    judged = zip(columns["ratio_rmse"], columns["error_nonfinite"], strict=True)
    columns["over"] = [wrong > 0 or not ratio <= budget for ratio, wrong in judged]
    columns["budget"] = [budget] * len(columns["over"])
    return columns


def _ratio(mine: float, theirs: float) -> float:
    if theirs == 0:
        return 0.0 if mine == 0 else float("inf")
    return mine / theirs
