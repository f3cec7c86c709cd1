"""The columns of one caught call: its error and the other's against golden, judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.formats.spec import Format
from assay.results.watch_record import ERROR
from assay.watching.clock import Moment
from assay.watching.figures import all_finite, figures
from assay.watching.scores import Scores
from assay.watching.sums import always_careful, gathered

OUTPUT_BUDGET, GRADIENT_BUDGET = 2.0, 3.0
"""How many times the error of the plain computation in the same format a call's may be."""
ENOUGH = 8
"""Rows that a head must have to be judged by itself. Chosen, not derived: with one row, as in decoding, 0 to 8% of the
heads of torch's own fp32 attention are over by chance, and of dq with 42 rows still 2 of 576."""
Columns = dict[str, list[Any]]
"""Column → one value for each head, then one for all."""


class Comparing:
    """Tensors by their names, as three computed them; `scores` is for the output.

    All figures come from the device at once. Until somebody asks for them, it may still be at work.
    """

    def __init__(
        self,
        actual: Mapping[str, Tensor],
        others: Sequence[Tensor],
        goldens: Sequence[Tensor | None],
        scores: Scores | None,
        format: Format,
    ) -> None:
        self._shapes = {name: x.shape for name, x in actual.items()}
        threes = list(zip(actual.values(), others, goldens, strict=True))
        found = gathered(threes, format)
        sent = [found] if scores is None else [found, scores.gathered()]
        self._sums, *self._scores = _sent(*sent)
        self._ready = Moment(found.device)
        # Only then are the tensors needed again, if something in them is not finite.
        self._again = None if always_careful(threes) else partial(gathered, threes, format, careful=True)

    @property
    def needs_tensors(self) -> bool:
        """Whether they must stay as they are until `columns` has been asked for."""
        return self._again is not None

    def columns(self) -> dict[str, Columns]:
        """Of each tensor."""
        self._ready.wait()
        if self._again is not None and not all_finite(self._sums):
            self._sums = self._again().cpu()
        self._again = None
        heads = [shape[1] for shape in self._shapes.values()]
        counts = [shape.numel() for shape in self._shapes.values()]
        each = [torch.tensor([*[n // h] * h, n], dtype=torch.float64) for n, h in zip(counts, heads, strict=True)]
        found = figures(self._sums, torch.cat(each))
        columns: dict[str, Columns] = {}
        begin = 0
        for (name, shape), count in zip(self._shapes.items(), heads, strict=True):
            part = {figure: values[begin : begin + count + 1] for figure, values in found.items()}
            enough = [shape[0] * shape[2] >= ENOUGH] * count + [True]
            columns[name] = _judged(part, OUTPUT_BUDGET if name == "output" else GRADIENT_BUDGET, enough)
            begin += count + 1
        for scores in self._scores:
            columns["output"] |= Scores.figures(scores)
        return columns


def _sent(*tensors: Tensor) -> list[Tensor]:
    """The same on the CPU, in one transfer, which may not be over yet."""
    numbers = torch.cat([x.flatten() for x in tensors]).to("cpu", non_blocking=True)
    return [each.view(x.shape) for each, x in zip(numbers.split([x.numel() for x in tensors]), tensors, strict=True)]


def _judged(found: dict[str, list[float]], budget: float, enough: list[bool]) -> Columns:
    columns: Columns = {name: found[name] for name in ("difference_max", "difference_rmse", "actual_nonfinite")}
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
    judged = zip(columns["ratio_rmse"], columns["error_nonfinite"], enough, strict=True)
    columns["over"] = [wrong > 0 or (many and not ratio <= budget) for ratio, wrong, many in judged]
    columns["budget"] = [budget] * len(columns["over"])
    return columns


def _ratio(mine: float, theirs: float) -> float:
    if theirs == 0:
        return 0.0 if mine == 0 else float("inf")
    return mine / theirs
