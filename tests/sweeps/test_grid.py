"""Which points a sweep has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from assay import Plan
from assay.cases.attention.plan import STEPS as PLAN_STEPS
from assay.cases.attention.plans import high_format, named_plan
from assay.results import record
from assay.sweeps.grid import STEPS, SWEEPS, default_sweep


@pytest.mark.parametrize("name", SWEEPS)
def test_every_point_is_another_one_and_groups_share_their_inputs(name: str) -> None:
    points = default_sweep(name, dim=32, seeds=2).points("cpu")
    assert len({point.id("CPU") for point in points}) == len(points)
    shared = {(p.group, p.inputs, p.shape, p.causal, p.seed) for p in points}
    assert len(shared) == len({group for group, *_ in shared})
    assert {point.seed for point in points} == {0, 1}


def test_whatever_changes_a_measurement_changes_its_id() -> None:
    point = default_sweep("inputs", inputs=("normal",), seeds=1).points("cpu")[0]
    assert type(point)(**_fields(point)).id("CPU") == point.id("CPU")
    lower = point.plan.replace(row_sum="fp8_e5m2", name=point.plan.name)
    for change in ({"plan": lower}, {"seed": 1}, {"block": (50, 51)}, {"baseline": lower}, {"options": {"exp2": True}}):
        assert type(point)(**{**_fields(point), **change}).id("CPU") != point.id("CPU")
    assert point.id("CPU") != point.id("NVIDIA H200")


def _fields(point: object) -> dict[str, Any]:
    return {name: getattr(point, name) for name in point.__dataclass_fields__}  # type: ignore[attr-defined]


def test_coordinates_are_columns_of_the_schema() -> None:
    point = default_sweep("steps", seeds=1).points("cpu")[3]
    assert set(point.coordinates()) == {*record.COORDINATES, *record.PLAN}
    assert record.PLAN_STEPS == PLAN_STEPS


def test_the_sweep_over_blocks_has_the_papers_rule() -> None:
    points = default_sweep("blocks", srams=(16_384, 65_536), formats=("bf16",), inputs=("normal",), seeds=1).points(
        "cpu"
    )
    blocks = {(p.block_shape, p.block) for p in points}
    # B_c = ⌈M/4d⌉, B_r = min(B_c, d), d = 64
    assert blocks == {
        ("paper", (64, 64)), ("swapped", (64, 64)), ("square", (64, 64)),
        ("paper", (64, 256)), ("swapped", (256, 64)), ("square", (128, 128)),
    }  # fmt: skip


def test_the_sweep_over_lengths_keeps_its_tile() -> None:
    points = default_sweep("length", lengths=(32, 128), seeds=1).points("cpu")
    assert {p.shape[2] for p in points} == {32, 128}
    assert {p.block for p in points} == {(50, 50)}


def test_the_sweep_over_steps_lowers_and_raises_each_and_all() -> None:
    points = default_sweep("steps", inputs=("normal",), seeds=3).points("cpu")
    count = Counter(point.role for point in points)
    assert count == {"low": 3, "high": 3, "lower": 30, "raise": 30, "path": 60}
    for point in points:
        raised = {step for step in STEPS if str(getattr(point.plan, step)) == "fp32"}
        assert point.step is None or point.step in STEPS
        expected = {
            "low": set(), "high": set(STEPS), "lower": set(STEPS) - {point.step}, "raise": {point.step},
        }  # fmt: skip
        if point.role == "path":
            assert len(raised) == point.position
            assert point.step in raised
        else:
            assert raised == expected[str(point.role)]
    for seed in range(3):
        paths = [[p.step for p in points if p.seed == seed and p.role == "path" and p.path == path] for path in (0, 1)]
        assert paths[0] == paths[1][::-1]
        assert sorted(map(str, paths[0])) == sorted(STEPS)


def test_captured_inputs_bring_their_own_shape_and_a_head_for_a_seed(tmp_path: Path) -> None:
    path = tmp_path / "captured.safetensors"
    save_file({name: torch.randn(1, 3, 20, 8) for name in "qkv"}, path)
    points = default_sweep("inputs", inputs=(f"file:{path}", "normal"), plans=("shipped",), seeds=5).points("cpu")
    captured = [point for point in points if point.inputs.startswith("file:")]
    assert {point.shape for point in captured} == {(1, 1, 20, 8)}
    assert [point.seed for point in captured if point.variant == "flash"] == [0, 1, 2]
    assert [point.seed for point in captured if point.variant == "SDPA math"] == [0, 1, 2]
    assert {point.variant for point in points if point.inputs == "normal"} == {"flash"}
    name = captured[0].coordinates()["inputs"]
    assert name.startswith("file:captured.safetensors@")
    assert str(tmp_path) not in name


@pytest.mark.parametrize("name", ["inputs", "kernels"])
def test_a_captured_call_brings_its_mask(name: str, tmp_path: Path) -> None:
    path = tmp_path / "captured.safetensors"
    tensors = {name: torch.randn(1, 1, 20, 8) for name in "qkv"}
    for notes, causal in (({"right": "0"}, {True}), ({"scale": "0.5"}, {False}), ({"left": "3"}, {False})):
        save_file(tensors, path, metadata=notes)
        points = default_sweep(name, inputs=(f"file:{path}",)).points("cpu")
        assert {point.causal for point in points} == causal
        assert {point.variant for point in points} >= {"SDPA flash (CPU)", "SDPA math"}
    with pytest.raises(ValueError, match="says itself which keys a query sees"):
        default_sweep("inputs", inputs=(f"file:{path}",), causal=True).points("cpu")


def test_steps_between_another_plan_and_all_high() -> None:
    points = default_sweep("steps", plans=("fp32_state",), inputs=("normal",), seeds=1).points("cpu")
    assert {point.ladder for point in points} == {"uniform bf16, state in fp32 → all steps in fp32"}
    low = next(point.plan for point in points if point.role == "low")
    assert low == named_plan("fp32_state", "bf16")


def test_kernels_are_not_asked_for_a_mask_that_they_align_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "cross.safetensors"
    save_file({"q": torch.ones(1, 1, 8, 4), "k": torch.ones(1, 1, 12, 4), "v": torch.ones(1, 1, 12, 4)}, path)
    points = default_sweep("kernels", inputs=(f"file:{path}",), seeds=1).points("cpu")
    assert {point.causal for point in points} == {False}
    assert {point.coordinates()["keys"] for point in points} == {12}


def test_plans_by_name() -> None:
    assert named_plan("shipped", "fp16") == Plan.shipped("fp16")
    changed = named_plan("uniform, row_sum=fp32,output = fp16", "bf16")
    assert changed == Plan.uniform("bf16").replace(row_sum="fp32", output="fp16")
    state = named_plan("fp32_state", "bf16")
    assert {step for step, fmt in state.formats().items() if fmt.name == "fp32"} == {
        "row_sum", "rescale", "output_accumulator", "normalization", "accumulator",
    }  # fmt: skip
    assert (high_format("bf16"), high_format("tf32"), high_format("fp32"), high_format("e8m13")) == (
        "fp32", "fp32", "fp64", "fp64",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("precison", {}, "Unknown sweep 'precison'. Did you mean precision"),
        ("precision", {"formats": ("bf61",)}, "Unknown format 'bf61'. Did you mean bf16"),
        ("precision", {"plans": ("shiped",)}, "Unknown plan 'shiped'. Did you mean shipped"),
        ("precision", {"plans": ("uniform,row_smu=fp32",)}, "Unknown step 'row_smu'. Did you mean row_sum"),
        ("precision", {"plans": ("uniform,row_sum",)}, "written step=format, got 'row_sum'"),
        ("precision", {"baselines": ("eagre",)}, "Did you mean eager"),
        ("inputs", {"inputs": ("norml",)}, "Did you mean normal"),
        ("precision", {"seeds": 0}, "seeds must be a whole number of at least 1, got 0"),
        ("precision", {"length": 1.5}, "length must be a whole number"),
        ("length", {"lengths": (64, 0)}, "at least 1, got 0"),
        ("length", {"lengths": ()}, "at least one of its lengths"),
        ("precision", {"order": "fa9"}, "fa1, fa2 or split_kv, got 'fa9'"),
        ("precision", {"block": (0, 4)}, "block sizes must be"),
        ("precision", {"heights": 4}, "has no heights"),
        ("length", {"length": 64}, "The sweep length has no use for length"),
        ("kernels", {"plans": ("shipped",), "order": "fa2"}, "The sweep kernels has no use for plans, order"),
        ("precision", {"plans": ("uniform,name=shipped bf16",)}, "Unknown step 'name'"),
    ],
)
def test_bad_sweeps_are_refused(name: str, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        default_sweep(name, **changes)
    assert says in str(error.value)
