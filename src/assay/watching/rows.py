"""The rows of one caught call, head by head and as a whole."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.formats.dtypes import format_of
from assay.results.environment import environment
from assay.results.record import Record
from assay.results.watch_record import WATCH
from assay.watching.comparing import Columns
from assay.watching.others import Call
from assay.watching.part import Part


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Where and what a call was."""

    layer: str
    step: int
    call: int
    implementation: str


class Rows:
    """Makes rows, all with the same provenance."""

    def __init__(self, watch: str, model: str, against: str, device: str) -> None:
        self._fixed: Record = dict.fromkeys(WATCH.columns)
        self._fixed |= {"schema": WATCH.version, "watch": watch, "model": model, "against": against}
        self._fixed |= environment(device)

    def of(
        self, seen: Seen, call: Call, part: Part | None, measured: Mapping[str, Columns], seconds: float
    ) -> list[Record]:
        """Of each tensor one for each head, then one for all (head None)."""
        common = self._fixed | call.columns()
        common |= {
            "layer": seen.layer, "step": seen.step, "call": seen.call, "implementation": seen.implementation,
            "format": str(format_of(call.dtype)), "seconds": seconds,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        }  # fmt: skip
        rows = []
        for tensor, columns in measured.items():
            heads = len(columns["difference_max"]) - 1
            first = 0 if part is None else part.first_head(heads)
            for number, values in enumerate(zip(*columns.values(), strict=True)):
                row = common | dict(zip(columns, values, strict=True))
                row["tensor"], row["head"] = tensor, None if number == heads else first + number
                row["id"] = _hash((row["watch"], seen.layer, seen.step, seen.call, tensor, row["head"]))
                rows.append(row)
        return rows


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
