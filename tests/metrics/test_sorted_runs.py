"""Buckets, runs, and the Triton partition (in its interpreter here, on the device where there is one)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.metrics import sorted_runs as module
from assay.metrics.sorted_runs import bucketed_runs, choose_pivots, partition_by_masks, sorted_runs


def draw(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def rare_outlier(n: int) -> Tensor:
    x = torch.zeros(n)
    x[n // 2] = 1.0
    return x


INPUTS = {
    "normal": draw(3000),
    "half zeros": torch.relu(draw(3000)),
    "zeros of both signs": torch.tensor([0.0, -0.0]).repeat(1500),
    "one value": torch.full((3000,), 2.5),
    "one value but one": rare_outlier(3000),
    "three values": torch.tensor([-1.0, 0.0, 1.0]).repeat(1000),
    "infinities": torch.cat([draw(1000), torch.full((2000,), math.inf), torch.full((500,), -math.inf)]),
    "subnormals": draw(3000) * 1e-44,
    "fp64": draw(3000).double(),
    "huge": draw(3000) * 1e38,
}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SINGLE_SORT_LIMIT", 50)
    monkeypatch.setattr(module, "SAMPLE", 256)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", INPUTS)
def test_runs_join_to_the_sorted_tensor(name: str) -> None:
    x = INPUTS[name]
    expected = torch.sort(x).values
    assert torch.equal(torch.cat(list(bucketed_runs(x, partition_by_masks))), expected)
    assert torch.equal(torch.cat(list(sorted_runs(x))), expected)


@pytest.mark.usefixtures("small_limits")
def test_buckets_are_about_equal() -> None:
    x = draw(100_000)
    sizes = [len(bucket) for bucket in partition_by_masks(x, choose_pivots(x))]
    assert len(sizes) == module.BUCKETS
    # A pivot from 256 draws sits at its quantile within 0.03 (one standard deviation); these are two apart.
    assert max(sizes) < 100_000 * (1 / 8 + 4 * 0.03)


@pytest.mark.usefixtures("small_limits")
def test_a_frequent_value_gets_its_own_bucket() -> None:
    x = torch.cat([torch.zeros(2000), draw(1000)])
    buckets = [b for b in partition_by_masks(x, choose_pivots(x)) if bool((b == 0).any())]
    assert len(buckets) == 1
    assert bool((buckets[0] == 0).all())


@pytest.mark.usefixtures("small_limits")
def test_a_sample_that_misjudges_is_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pivots that leave nearly everything in one bucket cost time, not the bound on the workspace."""
    x = draw(2000)
    pivots = iter([torch.tensor([-2.5, 2.5])])
    honest = choose_pivots
    monkeypatch.setattr(module, "choose_pivots", lambda y: next(pivots, honest(y)))
    runs = list(bucketed_runs(x, partition_by_masks))
    assert max(len(run) for run in runs) < len(x) / 2
    assert torch.equal(torch.cat(runs), torch.sort(x).values)


def test_the_random_state_of_the_user_is_untouched() -> None:
    before = torch.get_rng_state()
    choose_pivots(draw(100))
    assert torch.equal(torch.get_rng_state(), before)


INTERPRETED = """
import torch
from assay.metrics import sorted_runs, triton_partition
from tests.metrics.test_sorted_runs import INPUTS

sorted_runs.SINGLE_SORT_LIMIT, sorted_runs.SAMPLE, triton_partition.BLOCK = 200, 256, 512
for name, x in INPUTS.items():
    for size in (511, 512, 513, len(x)):
        part = x[:size]
        pivots = sorted_runs.choose_pivots(part)
        ours = triton_partition.partition(part, pivots)
        for bucket, expected in zip(ours, sorted_runs.partition_by_masks(part, pivots), strict=True):
            assert torch.equal(bucket, expected), (name, size)
    joined = torch.cat(list(sorted_runs.bucketed_runs(x, triton_partition.partition)))
    assert torch.equal(joined, torch.sort(x).values), name
print("interpreted")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton_partition_in_the_interpreter() -> None:
    """In a process of its own, since Triton reads TRITON_INTERPRET when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "interpreted", done.stderr


def test_cpu_needs_no_triton() -> None:
    code = """
import sys, torch
sys.modules["triton"] = None
from assay.metrics.state_dicts import compare_state_dicts
compare_state_dicts({"w": torch.ones(2)}, {"w": torch.zeros(2)})
assert "assay.metrics.triton_partition" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
