"""Compares caught calls with the other implementation and with golden, and keeps what was found, in bounded memory.

Where gradients will come, a call waits for them: then each implementation is computed once for all of it, forward and
backward. `settle` does not wait any longer, and puts the rows in the order in which things happened.
"""

from __future__ import annotations

import itertools
import uuid
import warnings
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from assay.formats.dtypes import format_of
from assay.results.record import Record
from assay.results.store import Store
from assay.results.watch_record import WATCH
from assay.results.watched import compared
from assay.watching.call import AttentionCall
from assay.watching.clock import Moment
from assay.watching.comparing import Comparing
from assay.watching.made import Made, UnderWay
from assay.watching.others import Call, Comparison, replayed
from assay.watching.rows import Rows, Seen
from assay.watching.worst import Worst

KEPT = 100_000
"""Rows kept in memory; with a folder all are on disk."""
IN_FLIGHT = 1
"""Comparisons that a GPU may still be at while the model goes on: with none, it would wait while we make rows."""
SCORES = {"cpu": 2**21, "cuda": 2**25}
"""Of a call, if only some calls are compared: it is then compared in as many of its sequences, or of the heads of one,
as have these, since the golden value of a large batch takes longer than a training step."""
AT_ONCE = 512
"""Calls at most that wait, for their gradients or for a step to be over."""


class Ledger:
    """The rows of one watch."""

    def __init__(
        self, model: str, against: str, other: Comparison, golden: bool, folder: Path | None, skipped: Counter[str],
        seldom: bool = False,
    ) -> None:  # fmt: skip
        self._turns: Counter[str] | None = Counter() if seldom else None
        self._model, self._against, self._other, self._golden = model, against, other, golden
        self._skipped = skipped
        self._store = None if folder is None else Store(folder, WATCH, remembers=False)
        self._makes_rows: Rows | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._waiting: list[Made] = []
        self._under_way: deque[UnderWay] = deque()
        self._compared: list[tuple[int, list[Record]]] = []
        self.rows: deque[Record] = deque(maxlen=KEPT)
        self.first_over: Record | None = None
        """Of a whole call or, where that is within budget, of its worst head."""
        self.first_nonfinite: Record | None = None
        """The first row of a whole call with NaN or infinities, also where golden has them."""
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
        part = None
        if self._turns is not None and isinstance(call, AttentionCall):
            part = call.some(self._turns[seen.layer], SCORES.get(out.device.type, SCORES["cuda"]))
            self._turns[seen.layer] += 1
            call, out = call.of(part), part.own(out)
        if not waits:
            one = Made(seen, call.detached(), out, next(self._numbers), part)
            self._compare_output(one)
            return one
        # A copy: the model may go on in place.
        one = Made(seen, call.detached(), out.clone(), next(self._numbers), part)
        self._waiting.append(one)
        return one

    def gradients(self, one: Made, grad: Tensor, found: Mapping[str, Tensor]) -> None:
        """They have come: that of the output, and those of the inputs by name."""
        if self._closed:
            return
        grad, tensors = one.own(grad), {f"d{name}": one.own(x) for name, x in found.items()}
        number = next(self._numbers)
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
        parts, self._compared = sorted(self._compared, key=lambda each: each[0]), []
        for _, rows in parts:
            self.rows.extend(rows)
            if self._store is not None:
                for row in rows:
                    self._store.append(row)
            self._look(rows)

    def _look(self, rows: list[Record]) -> None:
        """For the first that stands out."""
        for one in compared(rows):
            self.first_over = self.first_over or one.over
            if one.nonfinite:
                self.first_nonfinite = self.first_nonfinite or one.whole

    def _compare_output(self, one: Made) -> None:
        self._compare(one, {"output": one.output}, None, (one.number,))

    @torch.no_grad()
    def _compare(self, one: Made, actual: dict[str, Tensor], grad: Tensor | None, numbers: tuple[int, ...]) -> None:
        """Its output, its gradients, or both; these need that of the output."""
        device = one.output.device
        began = Moment(device)
        with torch.autocast(device.type, enabled=False):
            try:
                others = self._other(one.call, grad)
                goldens, scores = one.call.golden(grad) if self._golden else ([None] * len(others), None)
            except Exception as error:  # a plain function of the user's, or no memory left: the model goes on
                self._failed(one, error)
                return
            skip = len(others) - len(actual)  # an output that has been compared already
            found = (actual, others[skip:], goldens[skip:], None if skip else scores)
            comparing = Comparing(*found, format_of(one.call.dtype))
            again = None if skip else replayed(one.call, one.output, others[0], goldens[0])
        tensors, notes = ({}, {}) if again is None else (again.tensors(), again.notes())
        left = 0 if comparing.needs_tensors else IN_FLIGHT
        if left:  # copies: by the time it is known how bad it is, the model may have gone on in place
            tensors = {name: x.clone() for name, x in tensors.items()}
        self._under_way.append(UnderWay(one, numbers, comparing, began, Moment(device), tensors, notes))
        self._finish(left)

    def _failed(self, one: Made, error: Exception) -> None:
        first = next(iter(str(error).splitlines()), "")
        reason = f"an error while it was compared ({type(error).__name__}: {first})"
        if reason not in self._skipped:
            warnings.warn(f"A call of {one.seen.layer or 'the model'} met {reason}. The model goes on.", stacklevel=2)
        self._skipped[reason] += 1

    def _finish(self, left: int) -> None:
        """Make the rows of what was compared, but for the last `left`."""
        while len(self._under_way) > left:
            done = self._under_way.popleft()
            one, columns = done.one, done.comparing.columns()
            if self._makes_rows is None:
                device = str(one.output.device)
                self._makes_rows = Rows(uuid.uuid4().hex[:8], self._model, self._against, device)
            rows = self._makes_rows.of(one.seen, one.call, one.part, columns, done.ended.since(done.began))
            outputs = sum(row["tensor"] == "output" for row in rows)
            if outputs:
                self.calls += 1
                self.worst.offer(rows[:outputs], done.tensors, done.notes)
            parts = [part for part in (rows[:outputs], rows[outputs:]) if part]
            self._compared += zip(done.numbers, parts, strict=True)
