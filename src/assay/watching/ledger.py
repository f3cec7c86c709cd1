"""Compares caught calls with the other implementation and with golden, and keeps what was found, in bounded memory."""

from __future__ import annotations

import time
import uuid
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from assay.results.record import Record
from assay.results.store import Store
from assay.results.watch_record import WATCH
from assay.watching.others import Call, Comparison
from assay.watching.rows import Measured, Rows, Seen
from assay.watching.worst import Worst

OUTPUT_BUDGET, GRADIENT_BUDGET = 2.0, 3.0
"""How many times the error of the plain computation in the same format a call's may be."""
KEPT = 100_000
"""Rows kept in memory; with a folder all are on disk."""


class Ledger:
    """The rows of one watch."""

    def __init__(self, model: str, against: str, other: Comparison, golden: bool, folder: Path | None) -> None:
        self._model, self._against, self._other, self._golden = model, against, other, golden
        self._store = None if folder is None else Store(folder, WATCH)
        self._rows: Rows | None = None
        self.rows: deque[Record] = deque(maxlen=KEPT)
        self.first_over: Record | None = None
        self.worst = Worst()
        self.calls = 0

    def close(self) -> None:
        """All rows are whole on disk."""
        if self._store is not None:
            self._store.close()

    @torch.no_grad()
    def output(self, seen: Seen, call: Call, out: Tensor) -> None:
        """Of a call that has just been made."""
        began = time.perf_counter()
        with torch.autocast(out.device.type, enabled=False):
            call = call.detached()
            golden, scores = call.golden() if self._golden else (None, {})
            other = self._other.output(call)
            self.calls += 1
            self._keep(seen, call, Measured("output", OUTPUT_BUDGET, out, other, golden, scores), began)

    @torch.no_grad()
    def gradients(self, seen: Seen, call: Call, names: tuple[str, ...], grad: Tensor, found: list[Tensor]) -> None:
        """Of its inputs, given that of the output."""
        began = time.perf_counter()
        with torch.autocast(grad.device.type, enabled=False):
            call = call.detached()
            others = self._other.gradients(call, grad)
            goldens = call.in_double().plain_gradients(grad) if self._golden else [None] * len(found)
            for name, actual, other, golden in zip(names, found, others, goldens, strict=True):
                self._keep(seen, call, Measured(f"d{name}", GRADIENT_BUDGET, actual, other, golden, {}), began)

    def _keep(self, seen: Seen, call: Call, measured: Measured, began: float) -> None:
        if self._rows is None:
            self._rows = Rows(uuid.uuid4().hex[:8], self._model, self._against, str(measured.actual.device))
        row: Record = {}
        for row in self._rows.of(seen, call, measured, time.perf_counter() - began):
            self.rows.append(row)
            if self._store is not None:
                self._store.append(row)
        if row["over"] and self.first_over is None:  # the last row is that of all heads
            self.first_over = row
        self.worst.offer(row, call)
