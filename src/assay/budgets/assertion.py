"""A test's tolerance, derived: `assert_within_budget` instead of a guessed atol and rtol.

A fast implementation may be as wrong as its format makes a plain one, times a small factor. How wrong that is depends
on format, shape and inputs, so it is measured: both are compared with the golden value, the plain one in FP64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from assay.budgets import message
from assay.budgets.draws import Inputs, draws
from assay.budgets.figures import Measured, measure
from assay.budgets.runs import Function, run_three
from assay.budgets.verdict import Judged, check_enough
from assay.formats.dtypes import format_of


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """Every output and gradient under every distribution, judged; `print` shows a table."""

    name: str
    judged: tuple[Judged, ...]

    @property
    def over(self) -> tuple[Judged, ...]:
        """Those over their budgets, the worst first."""
        return tuple(sorted((j for j in self.judged if j.over), key=lambda j: -j.excess))

    def __str__(self) -> str:
        return message.table(self.name, self.judged)


def assert_within_budget(
    fn: Function,
    baseline: Function,
    inputs: Inputs,
    budget: float = 2.0,
    *,
    gradients: bool = False,
    gradient_budget: float = 3.0,
    golden: Function | None = None,
    seeds: int = 5,
    distributions: Sequence[str] | None = None,
    name: str | None = None,
) -> BudgetReport:
    """Raise an AssertionError unless the errors of `fn` are within `budget` times those of `baseline`.

    Both get the same tensors and return a tensor or several, `baseline` in plain operations and the same dtypes. Errors
    are distances from the golden value: `baseline` in FP64 on the same inputs (casts inside it then keep FP64), or
    `golden`, called with the inputs in FP64. Judged are the largest error, the RMSE, the ULPs (2 to the mean of
    log2(1 + ULPs): small results count as much as large ones), and with several seeds the mean error, signed and away
    from zero; a NaN or an infinity in a wrong place fails. With `gradients`, those of all floating inputs are judged
    too, within `gradient_budget`, for a gradient N(0, 1) that flows in.

    `inputs` is a tuple of tensors, or a function of `seed`, called with 0 to `seeds` - 1. If it also takes
    `distribution` it is called with each of `distributions`, by default those of `assay.cases.attention.inputs`.
    The message calls the whole `name`, by default what `fn` is called.
    """
    __tracebackhide__ = True
    for which, value in (("budget", budget), ("gradient_budget", gradient_budget)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{which} must be a factor above 0, such as 2.0; got {value!r}.")
    found: dict[tuple[str | None, str], list[Measured]] = {}
    layouts: dict[tuple[str | None, str], torch.Tensor] = {}
    for distribution, seed, tensors in draws(inputs, seeds, distributions):
        for key, three in run_three(fn, baseline, golden, tensors, (seed or 0) if gradients else None).items():
            found.setdefault((distribution, key), []).append(measure(three, seed))
            layouts[distribution, key] = three.fn
    judged = (
        _judge(key, measured, layouts[key], gradient_budget if key[1].startswith("gradient") else budget)
        for key, measured in found.items()
    )
    report = BudgetReport(name or _name_of(fn), tuple(judged))
    if report.over:
        raise AssertionError(message.failure(report.name, report.over, len(report.judged)))
    return report


def _judge(key: tuple[str | None, str], measured: list[Measured], layout: torch.Tensor, budget: float) -> Judged:
    judged = Judged(
        name=key[1],
        distribution=key[0],
        format=format_of(layout.dtype).name,
        shape=tuple(layout.shape),
        device=device_name(layout.device),
        budget=budget,
        seeds=tuple(measured),
    )
    check_enough(judged)
    return judged


def _name_of(fn: Function) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return "fn" if name == "<lambda>" else str(name)


def device_name(device: torch.device) -> str:
    """What computed it; of a CPU also the instructions that torch uses there, on which its sums depend."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else str(device)
