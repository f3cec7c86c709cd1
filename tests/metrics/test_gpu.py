"""The same figures on the device as on the CPU, and the bound on its memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from assay.metrics import sorted_runs
from assay.metrics.deviation import deviation
from assay.metrics.ulps import ulp_histogram
from assay.metrics.wasserstein import wasserstein

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def draw(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_deviation(dtype: torch.dtype) -> None:
    actual, reference = draw(100_000, 1, dtype), draw(100_000, 2, dtype)
    here = deviation(actual, reference, "bf16")
    there = deviation(actual.cuda(), reference.cuda(), "bf16")
    assert (there.max, there.max_index, there.ulp_max) == (here.max, here.max_index, here.ulp_max)
    assert there.quantiles == here.quantiles
    for name in ("mean", "std", "rmse", "relative", "bias", "cosine", "sqnr", "ulp_mean"):
        assert getattr(there, name) == pytest.approx(getattr(here, name), rel=1e-10)


def test_deviation_with_many_passes_and_a_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.metrics.chunks.DEVICE_CHUNK", 1000)
    monkeypatch.setattr("assay.metrics.order_statistics.GATHER_LIMIT", 500)
    actual, reference = draw(10_000, 1), draw(10_000, 2)
    actual[1234] = math.nan
    here, there = deviation(actual, reference), deviation(actual.cuda(), reference.cuda())
    assert there.quantiles == here.quantiles
    assert (there.max, there.max_index, there.nonfinite_mismatch) == (math.inf, (1234,), 1)


def test_ulp_histogram() -> None:
    actual, reference = draw(50_000, 1, torch.bfloat16), draw(50_000, 1)
    assert ulp_histogram(actual.cuda(), reference.cuda(), "bf16") == ulp_histogram(actual, reference, "bf16")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "m"), [(100_000, 100_000), (100_000, 77_777)])
def test_wasserstein(n: int, m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_runs, "SINGLE_SORT_LIMIT", 5000)
    a, b = draw(n, 1, dtype), draw(m, 2, dtype)
    for p in (1, 2):
        assert wasserstein(a.cuda(), b.cuda(), p) == pytest.approx(wasserstein(a, b, p), rel=1e-12)


def test_triton_and_masks_make_the_same_buckets() -> None:
    from assay.metrics.triton_partition import partition

    for x in (
        draw(1_000_003, 1),
        torch.relu(draw(1_000_003, 2)),
        draw(1_000_003, 3) * 1e-44,
        torch.zeros(9999),
    ):
        x = x.cuda()
        pivots = sorted_runs.choose_pivots(x)
        expected = sorted_runs.partition_by_masks(x, pivots)
        for bucket, other in zip(partition(x, pivots), expected, strict=True):
            assert torch.equal(bucket, other)


def test_two_runs_agree_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_runs, "SINGLE_SORT_LIMIT", 100_000)
    a, b = draw(3_000_000, 1).cuda(), draw(3_000_000, 2).cuda()
    assert len({wasserstein(a, b) for _ in range(5)}) == 1


@pytest.mark.parametrize("kind", ["normal", "half zeros"])
def test_memory_stays_within_three_times_the_inputs(kind: str) -> None:
    a, b = (torch.randn(10**8, device="cuda") for _ in range(2))
    if kind == "half zeros":
        a.relu_()
        b.relu_()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    wasserstein(a, b)
    inputs = 8 * 10**8
    assert torch.cuda.max_memory_allocated() - base + inputs <= 3 * inputs
