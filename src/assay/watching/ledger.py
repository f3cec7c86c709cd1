"""Compares caught calls with the other implementation and with golden, and keeps what was found, in bounded memory.

Where gradients will come, a call waits for them: then each implementation is computed once for all of it, forward and
backward. `settle` does not wait any longer, and puts the rows in the order in which things happened.
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from assay.formats.dtypes import format_of
from assay.results.record import Record
from assay.results.store import Store
from assay.results.watch_record import WATCH
from assay.watching.clock import Moment
from assay.watching.comparing import Comparing
from assay.watching.made import Made, UnderWay
from assay.watching.others import Call, Comparison
from assay.watching.rows import Rows, Seen
from assay.watching.worst import Worst

KEPT = 100_000
"""Rows kept in memory; with a folder all are on disk."""
IN_FLIGHT = 1
"""Comparisons that a GPU may still be at while the model goes on: with none, it would wait while we make rows."""
AT_ONCE = 512
"""Calls at most that wait, for their gradients or for a step to be over."""


class Ledger:
    """The rows of one watch."""

    def __init__(self, model: str, against: str, other: Comparison, golden: bool, folder: Path | None) -> None:
        self._model, self._against, self._other, self._golden = model, against, other, golden
        self._store = None if folder is None else Store(folder, WATCH, remembers=False)
        self._makes_rows: Rows | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._waiting: list[Made] = []
        self._under_way: deque[UnderWay] = deque()
        self._compared: list[tuple[int, list[Record]]] = []
        self.rows: deque[Record] = deque(maxlen=KEPT)
        self.first_over: Record | None = None
        self.worst = Worst()
        self.calls = 0

    def close(self) -> None:
        """All rows are whole on disk, and no more are made."""
        self._closed = True
        if self._store is not None:
            self._store.close()

    def output(self, seen: Seen, call: Call, out: Tensor, waits: bool) -> Made:
        """Of a call that has just been made; `waits` if its gradients may come."""
        if len(self._waiting) + len(self._compared) >= AT_ONCE:
            self.settle()
        if not waits:
            one = Made(seen, call.detached(), out, next(self._numbers))
            self._compare_output(one)
            return one
        one = Made(seen, call.detached(), out.clone(), next(self._numbers))  # a copy: the model may go on in place
        self._waiting.append(one)
        return one

    def gradients(self, one: Made, grad: Tensor, found: Mapping[str, Tensor]) -> None:
        """They have come: that of the output, and those of the inputs by name."""
        if self._closed:
            return
        tensors, number = {f"d{name}": x for name, x in found.items()}, next(self._numbers)
        if one in self._waiting:
            self._waiting.remove(one)
            self._compare(one, {"output": one.output} | tensors, grad, (one.number, number))
        else:
            self._compare(one, tensors, grad, (number,))

    def settle(self) -> None:
        """Compare what waits, without its gradients, and keep all rows."""
        while self._waiting:
            self._compare_output(self._waiting.pop(0))
        self._finish(0)
        compared, self._compared = sorted(self._compared, key=lambda each: each[0]), []
        for row in itertools.chain.from_iterable(rows for _, rows in compared):
            self.rows.append(row)
            if self._store is not None:
                self._store.append(row)
            if row["over"] and row["head"] is None and self.first_over is None:
                self.first_over = row

    def _compare_output(self, one: Made) -> None:
        self._compare(one, {"output": one.output}, None, (one.number,))

    @torch.no_grad()
    def _compare(self, one: Made, actual: dict[str, Tensor], grad: Tensor | None, numbers: tuple[int, ...]) -> None:
        """Its output, its gradients, or both; these need that of the output."""
        device = one.output.device
        began = Moment(device)
        with torch.autocast(device.type, enabled=False):
            others = self._other(one.call, grad)
            goldens, scores = one.call.golden(grad) if self._golden else ([None] * len(others), None)
            skip = len(others) - len(actual)  # an output that has been compared already
            found = (actual, others[skip:], goldens[skip:], None if skip else scores)
            comparing = Comparing(*found, format_of(one.call.dtype))
        tensors, left = {} if skip else one.call.tensors(), 0 if comparing.needs_tensors else IN_FLIGHT
        if left:  # copies: by the time it is known how bad it is, the model may have gone on in place
            tensors = {name: x.clone() for name, x in tensors.items()}
        self._under_way.append(UnderWay(one, numbers, comparing, began, Moment(device), tensors))
        self._finish(left)

    def _finish(self, left: int) -> None:
        """Make the rows of what was compared, but for the last `left`."""
        while len(self._under_way) > left:
            done = self._under_way.popleft()
            one, columns = done.one, done.comparing.columns()
            if self._makes_rows is None:
                device = str(one.output.device)
                self._makes_rows = Rows(uuid.uuid4().hex[:8], self._model, self._against, device)
            rows = self._makes_rows.of(one.seen, one.call, columns, done.ended.since(done.began))
            outputs = sum(row["tensor"] == "output" for row in rows)
            if outputs:
                self.calls += 1
                self.worst.offer(rows[outputs - 1], done.tensors, one.call.notes())  # after its heads the row of all
            parts = [part for part in (rows[:outputs], rows[outputs:]) if part]
            self._compared += zip(done.numbers, parts, strict=True)
