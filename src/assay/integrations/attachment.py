"""A watch and weight deviation over somebody else's training loop: what the callbacks of all libraries share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from assay.integrations.weight_deviation import WeightDeviation
from assay.results.record import Record
from assay.results.watched import Compared, compared
from assay.watching.watch import KNOWN, Watch, watch


class WatchOptions(TypedDict, total=False):
    """Those of `assay.watch`."""

    against: str
    golden: bool
    every: int | float
    also: Mapping[Callable[..., Any], Callable[..., Any]] | None
    out: Path | str | None


_open: dict[int, Attachment] = {}
"""Thread → what is attached to its training."""


class Attachment:
    """Begun with a training, told of its steps, closed at its end.

    Some loops begin anew and do not say that the last one failed, as with a smaller batch. A thread trains one model at
    a time, so whatever is still attached to an earlier training of the same thread is removed when the next begins.
    """

    def __init__(self, watching: bool, weights: WeightDeviation | None, options: WatchOptions) -> None:
        if not watching and (weights is None or options):
            raise ValueError(
                "watch=False needs weights=WeightDeviation(…), else nothing is left, and no options of a watch; "
                f"got weights={weights}, {', '.join(options) or 'no options'}."
            )
        watch(nn.Identity(), **options)  # says now what is wrong with them
        self._watching, self._weights, self._options = watching, weights, options
        self._thread = -1
        self._last: Record | None = None
        self._figures: dict[str, float] = {}
        self.watch: Watch | None = None
        """Of this training, or of the last one."""

    def begin(self, model: nn.Module, step: int, first: bool) -> None:
        """After `step` steps; `first` is the process that keeps and compares weights."""
        self._thread = threading.get_ident()
        left = _open.pop(self._thread, None)
        if left is not None:
            left.close()
        self._figures, self._last = {}, None
        self._model, self._first = model, first
        if self._weights is not None and first:
            self._weights.begin(model, step)
        if self._watching:
            self.watch = watch(model, **self._options).__enter__()
            self.watch.end_step()  # the first is yet to begin
        _open[self._thread] = self

    def begin_step(self, step: int) -> None:
        """After `step` steps another one begins, or goes on with more data."""
        if self.watch is not None:
            self.watch.begin_step(step)

    def end_step(self, step: int) -> bool:
        """`step` steps are over. Whether there are figures that belong to this one."""
        if self.watch is not None:
            self.watch.end_step()
            if not self.watch.found:
                self.close()
                raise ValueError(
                    f"No attention was found in {type(self._model).__name__}: its first step called none of "
                    f"{KNOWN}. Name others with also={{fast: plain}}, or leave it out with watch=False."
                )
            self._look(self.watch)
        found = self._weights.end_step(self._model, step) if self._weights is not None and self._first else {}
        self._figures |= {f"assay/weights/{name}": value for name, value in found.items()}
        return bool(found)

    def take(self) -> dict[str, float]:
        """The figures since they were taken last: the worst of the calls, the latest of the weights."""
        found, self._figures = self._figures, {}
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Nothing is attached any more; closed again, nothing happens."""
        if _open.get(self._thread) is self:
            del _open[self._thread]
        if self.watch is not None:
            self.watch.close()

    def _look(self, seen: Watch) -> None:
        """At the calls that are new."""
        new: list[Record] = []
        for row in reversed(seen.rows):
            if row is self._last:
                break
            new.append(row)
        self._last = new[0] if new else self._last
        for one in compared(reversed(new)):
            _add(self._figures, one)


def _add(figures: dict[str, float], one: Compared) -> None:
    """Ratio and error are those of all heads; one that is over budget counts, as in the watch's summary."""
    row, over = one.whole, one.over is not None
    kind = "assay/" if row["tensor"] == "output" else "assay/gradient_"
    if row["ratio_rmse"] is None:
        _raise(figures, f"{kind}difference", row["difference_max"])
        return
    _raise(figures, f"{kind}ratio", row["ratio_rmse"])
    _raise(figures, f"{kind}error", row["error_max"])
    for name, count in (("over_budget", over), ("nonfinite", row["error_nonfinite"])):
        figures[f"assay/{name}"] = figures.get(f"assay/{name}", 0.0) + float(count)


def _raise(figures: dict[str, float], name: str, value: float) -> None:
    """To the larger of the two; a NaN stays."""
    before = figures.get(name, value)
    figures[name] = before if before != before or before >= value else value
