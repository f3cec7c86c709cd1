"""One pytest session's dealings with the recorded error ratios: compare them, or record new ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.integrations.regressions import Records, Worse, ratios_of, worse

if TYPE_CHECKING:
    from assay.budgets.assertion import BudgetReport


class Recorder:
    """Compares what tests measure with the file at `path`, or with `update` writes it there at the end."""

    def __init__(self, path: Path, update: bool) -> None:
        self.path, self.update = path, update
        self._changed = 0
        self._unknown: set[str] = set()

    @cached_property
    def _records(self) -> Records:
        return Records(self.path)

    def recording(self, measure: Callable[..., BudgetReport], test: str) -> Callable[..., BudgetReport]:
        """`measure`, whose report is then compared or recorded; a test's second call counts as `test #2`."""
        calls = 0

        def measured(*args: Any, **kwargs: Any) -> BudgetReport:
            __tracebackhide__ = True
            nonlocal calls
            calls += 1
            report = measure(*args, **kwargs)
            self._take(test if calls == 1 else f"{test} #{calls}", report)
            return report

        return measured

    def _take(self, test: str, report: BudgetReport) -> None:
        __tracebackhide__ = True
        import torch

        ratios, device = ratios_of(report), report.judged[0].device
        if self.update:
            self._changed += self._records.add(test, device, str(torch.__version__), ratios)
            return
        last = self._records.latest(test, device)
        if last is None:
            self._unknown.add(test)
        elif found := worse(last["ratios"], ratios):
            raise AssertionError(_message(report.name, last, found, self.path))

    def write(self) -> None:
        """Write the file if anything in it is new."""
        if self._changed:
            self._records.write()

    def summary(self) -> str | None:
        """A line for the end of the session, if there is something to say."""
        if self._changed:
            return f"assay: recorded {self._changed} new error ratios in {self.path}; commit it."
        if self._unknown:
            return (
                f"assay: {len(self._unknown)} measurements have no record on this device to be compared with; "
                "pytest --assay-update records them."
            )
        return None


def _message(name: str, last: dict[str, Any], found: list[Worse], path: Path) -> str:
    width = max(len(w.what) for w in found)
    lines = [f"  {w.what.ljust(width)}  {w.recorded:<10.4g}{w.now:<10.4g}{w.limit:.4g}" for w in found]
    header = f"  {''.ljust(width)}  {'recorded':<10}{'now':<10}limit"
    return "\n".join(
        [
            f"{name} is within its budget, but worse than recorded on {last['date']} (torch {last['torch']}, "
            f"{last['device']}), beyond what the spread over seeds explains. Error over the baseline's, mean of seeds:",
            "",
            header,
            *lines,
            "",
            f"What to do: find the change that did it. To accept it, run pytest --assay-update and commit {path.name}.",
        ]
    )
