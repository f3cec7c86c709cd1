"""What is claimed of the insides of real kernels."""

from __future__ import annotations

import pytest
from torch import Tensor

from assay import Plan, tiled_attention
from assay.cases.attention import validate as validation
from assay.cases.attention.kernels import OURS, Kernel, _fa2_splits

H200_SLOTS = 2 * 132


@pytest.mark.parametrize(
    ("programs", "blocks", "splits"),
    [
        (4 * 16, 4, 4),  # 4 heads, N 1024: 64 programs leave 200 slots idle; 4 parts fill 256 of 264
        (16 * 16, 4, 1),  # 16 heads fill the GPU
        (212, 64, 1),  # 0.8 of the slots is enough
        (211, 64, 5),  # one fewer is not: 1055 programs in 4 waves of 264, the first filling within 85% of the best
        (1, 1, 1),  # there is nothing to split
        (1, 200, 100),  # of the counts up to 128, 100 is the last that changes how many blocks a part has
    ],
)
def test_fa2_splits_the_keys_where_the_gpu_would_be_idle(programs: int, blocks: int, splits: int) -> None:
    assert _fa2_splits(programs, H200_SLOTS, blocks) == splits


def test_perturbed_kernels_say_what_they_change() -> None:
    names = [kernel.name for kernel in OURS]
    assert len(set(names)) == len(names)
    assert names[:2] == ["assay", "assay: row_sum in the input format"]
    by_name = {kernel.name: kernel for kernel in OURS}
    exact = by_name["assay: probabilities in fp32"]
    assert exact.formats == ("bf16", "fp16")
    assert exact.plan("bf16") == Plan.shipped("bf16").replace(
        probabilities="fp32", name="shipped bf16, probabilities in fp32"
    )
    tiles = by_name["assay: tiles of 64 × 32"]
    assert tiles.plan("fp16") == Plan.shipped("fp16").replace(name="shipped fp16, tiles of 64 × 32")


def test_dv_of_a_kernel_with_its_own_p_is_the_shipped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that casts P as shipped, of which the plan says otherwise: its dV is emulated with all bits."""

    def shipped(q: Tensor, k: Tensor, v: Tensor, causal: bool, **_: object) -> Tensor:
        return tiled_attention(q, k, v, plan=Plan.shipped("bf16"), causal=causal, block=(64, 64))

    kernel = Kernel(
        name="made up",
        call=shipped,
        plan=lambda format: Plan.shipped(format).replace(probabilities="fp32"),
        tiling=lambda q, k: {"block": (64, 64)},
        own_p=True,
    )
    monkeypatch.setattr(validation, "available_kernels", lambda device: [kernel])
    equal = {row.part: row.bit_equal for row in validation.validate(formats=("bf16",), shape=(1, 1, 128, 16))}
    assert equal["dv"] == 1
    assert equal["output"] < 1
