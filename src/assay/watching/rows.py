"""The rows of one caught call: its error and the other's against golden, head by head and as a whole."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from assay.formats.dtypes import format_of
from assay.formats.spec import Format
from assay.results.environment import environment
from assay.results.record import Record
from assay.results.watch_record import ERROR, WATCH
from assay.watching.figures import brief, figures
from assay.watching.others import Call


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Where and what a call was."""

    layer: str
    step: int
    call: int
    implementation: str


class Measured(NamedTuple):
    """One tensor of a call, as three computed it."""

    tensor: str
    """"output", "dq", …"""
    budget: float
    actual: Tensor
    other: Tensor
    golden: Tensor | None
    scores: dict[str, list[float]]
    """What the scores are like: column → one number for each head, then one for all."""


class Rows:
    """Makes rows, all with the same provenance."""

    def __init__(self, watch: str, model: str, against: str, device: str) -> None:
        self._fixed = {"watch": watch, "model": model, "against": against, **environment(device)}

    def of(self, seen: Seen, call: Call, found: Measured, seconds: float) -> Iterator[Record]:
        """One for each head, then one for all (head None)."""
        tensor, budget, actual, other, golden, scores = found
        format = format_of(call.dtype)
        between = brief(actual, other)
        measured: dict[str, list[Any]] = {f"difference_{name}": between[name] for name in ("max", "rmse")} | scores
        if golden is not None:
            measured |= _against_golden(actual, other, golden, format, budget)
        heads = actual.shape[1]
        place = {"layer": seen.layer, "step": seen.step, "call": seen.call, "tensor": tensor}
        for number in range(heads + 1):
            head = None if number == heads else number
            row: Record = dict.fromkeys(WATCH.columns)
            row |= self._fixed | place | call.columns() | {name: values[number] for name, values in measured.items()}
            row |= {
                "schema": WATCH.version,
                "id": _hash((self._fixed["watch"], *place.values(), head)),
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                "seconds": seconds,
                "head": head,
                "implementation": seen.implementation,
                "format": str(format),
                "budget": budget if golden is not None else None,
            }
            yield row


def _against_golden(
    actual: Tensor, other: Tensor, golden: Tensor, format: Format, budget: float
) -> dict[str, list[Any]]:
    error, baseline = figures(actual, golden, format), brief(other, golden)
    # A baseline may happen to be nearly exact. Nobody is nearer than golden rounded once.
    floor = brief(golden.to(actual.dtype), golden)
    ratios = {
        name: [
            _ratio(mine, max(theirs, least))
            for mine, theirs, least in zip(error[name], baseline[name], floor[name], strict=True)
        ]
        for name in ("max", "rmse")
    }
    return {
        **{f"error_{name}": error[name] for name in ERROR},
        **{f"baseline_{name}": baseline[name] for name in ("max", "rmse", "bias")},
        **{f"ratio_{name}": found for name, found in ratios.items()},
        "over": [
            wrong > 0 or not ratio <= budget for ratio, wrong in zip(ratios["rmse"], error["nonfinite"], strict=True)
        ],
    }


def _ratio(mine: float, theirs: float) -> float:
    if theirs == 0:
        return 0.0 if mine == 0 else float("inf")
    return mine / theirs


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
