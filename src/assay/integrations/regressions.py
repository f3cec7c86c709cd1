"""Error ratios over time: a JSON file beside the tests, and whether today's ratios are worse than recorded.

Unchanged code gives the same ratios again. Code that adds up in another order draws other errors of the same size, and
its ratios move as they do from seed to seed. So a mean over seeds may exceed the recorded one by Student's t times the
standard error that both spreads over the seeds give the difference; t is such that a test with no more than that fails
in one of a thousand changes, however many ratios it has.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from assay._files import write_whole
from assay.metrics.student_t import student_t, variance

if TYPE_CHECKING:
    from assay.budgets.assertion import BudgetReport

FALSE_ALARMS = 0.001
"""Chance that a test fails after a change that only draws other errors."""
FEWEST_SEEDS = 3
_VERSION = 1
_DIGITS = 4
"""Significant digits of a recorded ratio."""

Ratios = Mapping[str, Sequence[float]]
"""From what is compared to its ratio on each seed."""


class Worse(NamedTuple):
    """A ratio that rose beyond its limit; means over seeds."""

    what: str
    recorded: float
    now: float
    limit: float


def worse(recorded: Ratios, now: Ratios) -> list[Worse]:
    """What is worse now, beyond what the spread over seeds explains."""
    both = [what for what in now if what in recorded]
    found = []
    for what in both:
        old, new = recorded[what], now[what]
        mean, freedom = math.fsum(old) / len(old), len(old) + len(new) - 2
        pooled = ((len(old) - 1) * variance(old) + (len(new) - 1) * variance(new)) / freedom
        error = math.sqrt(pooled * (1 / len(old) + 1 / len(new)))
        # The last term is what rounding to the record's digits can do.
        limit = mean + student_t(1 - 2 * FALSE_ALARMS / len(both), freedom) * error + 10 ** (1 - _DIGITS) * mean
        if math.fsum(new) / len(new) > limit:
            found.append(Worse(what, mean, math.fsum(new) / len(new), limit))
    return found


def ratios_of(report: BudgetReport) -> dict[str, list[float]]:
    """The ratios of largest errors and of RMSEs on each seed, rounded for the record."""
    found = {}
    for judged in report.judged:
        if len(judged.seeds) < FEWEST_SEEDS:
            raise ValueError(
                f"What is recorded needs at least {FEWEST_SEEDS} seeds, whose spread tells a regression from chance; "
                f"got {len(judged.seeds)}. Pass inputs as a function of a seed."
            )
        what = judged.name if judged.distribution is None else f"{judged.name} ({judged.distribution})"
        found[f"{what}, max"] = [_rounded(m.ratio_max) for m in judged.seeds]
        found[f"{what}, RMSE"] = [_rounded(m.ratio_rmse) for m in judged.seeds]
    return found


def _rounded(ratio: float) -> float:
    return float(f"{ratio:.{_DIGITS}g}")


class Records:
    """The file: for every test its entries, the oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, list[dict[str, Any]]] = {}
        if path.exists():
            self.tests = _read(path)

    def latest(self, test: str, device: str) -> dict[str, Any] | None:
        """The newest entry of this test on this device: other devices draw other errors."""
        return next((e for e in reversed(self.tests.get(test, [])) if e["device"] == device), None)

    def add(self, test: str, device: str, torch: str, ratios: Ratios) -> bool:
        """Append an entry; False, and nothing is appended, if the newest of this device has the same ratios."""
        last = self.latest(test, device)
        if last is not None and last["ratios"] == ratios:
            return False
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        entry = {"date": today, "device": device, "torch": torch, "ratios": dict(ratios)}
        self.tests.setdefault(test, []).append(entry)
        return True

    def write(self) -> None:
        """The whole file or nothing; an entry a line, so that a change is a line of a diff."""
        tests = ",\n".join(
            f"  {json.dumps(test)}: [\n" + ",\n".join(f"   {json.dumps(entry)}" for entry in entries) + "\n  ]"
            for test, entries in sorted(self.tests.items())
        )
        write_whole(self.path, f'{{\n "assay_records": {_VERSION},\n "tests": {{\n{tests}\n }}\n}}\n'.encode())


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["assay_records"] != _VERSION:
            raise ValueError(f"its version is {found['assay_records']!r}")
        tests: dict[str, list[dict[str, Any]]] = found["tests"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must hold error ratios that pytest --assay-update wrote (version {_VERSION}), but: {error}. "
            "Restore it, or delete it and run pytest --assay-update."
        ) from error
    return tests
