from __future__ import annotations

import dataclasses

import pytest

from assay import Format, Plan, formats
from assay.cases.attention.plan import STEPS


def test_steps_are_the_fields() -> None:
    fields = [f.name for f in dataclasses.fields(Plan)]
    assert tuple(fields[: len(STEPS)]) == STEPS
    assert list(Plan.uniform("bf16").formats()) == list(STEPS)


def test_uniform_is_one_format_but_for_the_matrix_unit() -> None:
    plan = Plan.uniform("bf16")
    bf16 = formats.get("bf16")
    assert {step for step, fmt in plan.formats().items() if fmt != bf16} == {"accumulator"}
    assert plan.accumulator == formats.get("fp32")
    assert Plan.fp64().accumulator == formats.get("fp64")
    assert Plan.uniform("e11m10").accumulator == formats.get("fp64")  # FP32 has too few exponent bits


def test_shipped_keeps_state_in_fp32() -> None:
    plan = Plan.shipped("fp16")
    narrow = {step for step, fmt in plan.formats().items() if fmt == formats.get("fp16")}
    assert narrow == {"inputs", "probabilities", "dscores", "output"}
    assert {str(f) for f in plan.formats().values()} == {"fp16", "fp32"}


def test_replace_changes_one_step_and_the_name() -> None:
    plan = Plan.uniform("bf16").replace(row_sum="fp32")
    assert plan.row_sum == formats.get("fp32")
    assert plan.scores == formats.get("bf16")
    assert plan.name == "uniform bf16 with row_sum=fp32"
    assert plan.replace(row_sum=Format(exponent=8, mantissa=7)) == Plan.uniform("bf16")


def test_plain_values_hold_everything() -> None:
    plan = Plan.fa3_fp8()
    written = plan.as_dict()
    assert set(written) == {f.name for f in dataclasses.fields(Plan)}
    assert written["accumulator"] == "e8m13"
    assert written["probabilities"] == "fp8_e4m3"
    assert all(isinstance(value, str | int | bool | None) for value in written.values())


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Plan.uniform("bf17"), "Unknown format 'bf17'. Did you mean bf16"),
        (lambda: Plan.uniform("bf16").replace(rowsum="fp32"), "Unknown step 'rowsum'. Did you mean row_sum"),
        (lambda: Plan.uniform("bf16").replace(zzz="fp32"), "The steps are: inputs, scores"),
        (lambda: Plan.uniform("bf16").replace(scores="fp99"), "Unknown format 'fp99'"),
        (lambda: Plan.uniform("bf16").replace(promotion=48), r"multiple of accumulator_width \(32\).*got 48"),
        (lambda: Plan.uniform("bf16").replace(accumulator_width=0), "at least 1, got 0"),
    ],
)
def test_says_what_is_wrong(build, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=says):
        build()
