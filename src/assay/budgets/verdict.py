"""What the errors come to over the seeds, and which of them is over the budget.

An error is judged by its ratio to the baseline's, or to the floor where that is larger; bits by 2 to their difference.
Seeds are judged together: the largest error of all, the RMSE of all, the mean of the wrong bits, the mean bias with the
interval that its spread over the seeds gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from assay.budgets.figures import Errors, Measured
from assay.metrics.student_t import mean_and_half_width

CONFIDENCE = 0.95
"""Of the intervals of biases. With 5 seeds an implementation as good as the baseline then seems biased beyond twice the
baseline's in 3 of a million comparisons (simulated with normal errors)."""
FEWEST = 32
"""Numbers that an error ratio needs. With n of them two equally good implementations seem to differ by a factor
above 2 in RMSE with the probability P(F(n, n) > 4): 30% for 1 number, 1% for 12, 0.01% for 32."""


class Check(NamedTuple):
    """One figure against what the baseline allows."""

    figure: str
    """max, RMSE, bits, bias or outward."""
    ratio: float
    """fn's over the baseline's or the floor's. Of biases: the least that the interval admits over the most. NaN, which
    is over any budget, where fn has no finite number."""
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One output or gradient over all seeds of one distribution."""

    name: str
    distribution: str | None
    format: str
    shape: tuple[int, ...]
    device: str
    budget: float
    seeds: tuple[Measured, ...]

    @property
    def numbers(self) -> int:
        """Numbers compared."""
        return sum(m.numbers for m in self.seeds)

    @property
    def misplaced(self) -> int:
        """NaN and infinities in wrong places."""
        return sum(m.misplaced for m in self.seeds)

    @property
    def fn(self) -> Errors:
        """Of fn, over all seeds."""
        return _pool((m.fn, m.numbers) for m in self.seeds)

    @property
    def baseline(self) -> Errors:
        """Of the baseline, over all seeds."""
        return _pool((m.baseline, m.numbers) for m in self.seeds)

    @property
    def floor(self) -> Errors:
        """Of the golden value rounded once, over all seeds."""
        return _pool((m.floor, m.numbers) for m in self.seeds)

    def interval(self, of: str, figure: str) -> tuple[float, float]:
        """Mean bias over the seeds and its half-width; of "fn", "baseline" or "floor"; figure bias or outward."""
        if of == "floor":  # independent roundings without a bias
            return 0.0, NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * self.floor.rmse / math.sqrt(self.numbers)
        return mean_and_half_width([getattr(getattr(m, of), figure) for m in self.seeds], CONFIDENCE)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The figures, judged; biases only where several seeds tell them from chance."""
        fn, baseline, floor = self.fn, self.baseline, self.floor
        ratios = {
            "max": fn.max / max(baseline.max, floor.max),
            "RMSE": fn.rmse / max(baseline.rmse, floor.rmse),
            "bits": 2 ** (fn.bits - max(baseline.bits, floor.bits)),
        }
        for figure in ("bias", "outward") if len(self.seeds) > 1 else ():
            mean, half = self.interval("fn", figure)
            allowed = [abs(m) + h for m, h in (self.interval("baseline", figure), self.interval("floor", figure))]
            ratios[figure] = max(abs(mean) - half, 0.0) / max(allowed)  # in this order a NaN stays
        return tuple(Check(figure, ratio, not ratio <= self.budget) for figure, ratio in ratios.items())

    @property
    def over(self) -> bool:
        """Whether it is over its budget."""
        return self.misplaced > 0 or any(check.over for check in self.checks)

    @property
    def excess(self) -> float:
        """The worst of its ratios over its budget; infinite with a NaN in a wrong place."""
        return math.inf if self.misplaced else max(check.ratio for check in self.checks) / self.budget


def _pool(each: Iterable[tuple[Errors, int]]) -> Errors:
    """Over the seeds: the largest maxima, the mean of the rest (of squares, for RMSE), weighted by their numbers."""
    pairs = list(each)
    errors, total = [e for e, _ in pairs], sum(numbers for _, numbers in pairs)

    def mean(values: Iterable[float]) -> float:
        return sum(value * numbers for value, (_, numbers) in zip(values, pairs, strict=True)) / total

    return Errors(
        max(e.max for e in errors),
        math.sqrt(mean(e.rmse**2 for e in errors)),
        mean(e.bias for e in errors),
        mean(e.outward for e in errors),
        max(e.ulp_max for e in errors),
        mean(e.ulp_mean for e in errors),
        mean(e.bits for e in errors),
    )


def check_enough(judged: Judged) -> None:
    """Raise a ValueError if there are too few numbers for a ratio to mean something."""
    if judged.numbers < FEWEST:
        raise ValueError(
            f"An error ratio needs at least {FEWEST} numbers, or chance decides; {judged.name} has {judged.numbers} "
            f"over {len(judged.seeds)} seed(s). Take larger inputs, or a function of a seed for them and raise seeds=."
        )
