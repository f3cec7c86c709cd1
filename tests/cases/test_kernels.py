"""What is claimed of the insides of real kernels."""

from __future__ import annotations

import pytest

from assay.cases.attention.kernels import _fa2_splits

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
