"""Plans by name, as the command line takes them: "shipped", or "uniform,row_sum=fp32"."""

from __future__ import annotations

from collections.abc import Callable

from assay._suggest import did_you_mean
from assay.cases.attention.plan import STEPS, Plan
from assay.formats.catalog import FP32, get
from assay.formats.spec import Format

_STATE = ("row_sum", "rescale", "output_accumulator", "normalization")


def _fp32_state(format: str) -> Plan:
    """Every step in one format, but what is carried from block to block in FP32."""
    state = Plan.shipped(format).row_sum
    return Plan.uniform(format).replace(**dict.fromkeys(_STATE, state), name=f"uniform {get(format)}, state in {state}")


FAMILIES: dict[str, Callable[[str], Plan]] = {
    "uniform": Plan.uniform,
    "fp32_state": _fp32_state,
    "shipped": Plan.shipped,
    "eager": Plan.eager,
}


def named_plan(text: str, format: str) -> Plan:
    """The plan of a family in `format`, with steps changed: "uniform,row_sum=fp32,output=fp32"."""
    family, *changes = (part.strip() for part in text.split(","))
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES)
        raise ValueError(
            f"Unknown plan {family!r}. {hint}There are: {', '.join(FAMILIES)}; steps are changed as in "
            "uniform,row_sum=fp32."
        )
    plan = FAMILIES[family](format)
    if not changes:
        return plan
    steps: dict[str, Format | str | int | None] = {}
    for change in changes:
        step, equals, value = (part.strip() for part in change.partition("="))
        if not equals or not value:
            raise ValueError(f"A change of a plan is written step=format, got {change!r}. For example row_sum=fp32.")
        if step not in STEPS:
            hint = did_you_mean(step, STEPS)
            raise ValueError(f"Unknown step {step!r}. {hint}The steps are: {', '.join(STEPS)}.")
        steps[step] = value
    return plan.replace(**steps)


def high_format(format: str) -> str:
    """What "high" is beside `format`: FP32, or FP64 where that is not far enough above."""
    return "fp32" if get(format).mantissa <= FP32.mantissa // 2 else "fp64"
