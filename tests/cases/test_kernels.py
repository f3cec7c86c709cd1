"""What is claimed of the insides of real kernels."""

from __future__ import annotations

import pytest

from assay import Plan
from assay.cases.attention.kernels import OURS, _fa2_splits

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
