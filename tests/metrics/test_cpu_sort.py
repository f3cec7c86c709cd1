from __future__ import annotations

import numpy as np
import pytest
import torch

from assay.metrics import cpu_sort


def values(count: int) -> torch.Tensor:
    """Every kind of FP32 but NaN: both signs, zeros, subnormals, infinities, repeats."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    x = bits.view(np.float32)
    special = np.array([0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, 1.0, 1.0, -1.0], dtype=np.float32)
    return torch.from_numpy(np.concatenate([x[~np.isnan(x)], special]))


@pytest.mark.parametrize("count", [0, 1, 1000, 100_000])
def test_radix_sort_sorts(count: int) -> None:
    x = values(count)
    before = x.clone()
    ours = cpu_sort.radix_sort(x)
    assert np.array_equal(ours.numpy(), np.sort(x.numpy()))
    assert torch.equal(x, before)


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_either_way_gives_the_same_values(radix: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sort, "WORTH_ASKING", 1)
    monkeypatch.setattr(cpu_sort, "_radix_beats_numpy", lambda: radix)
    x = values(5000).to(dtype)[::2]
    assert np.array_equal(cpu_sort.sort_copies(x, x)[1].numpy(), np.sort(x.numpy()))


@pytest.mark.parametrize(("numpy_seconds", "radix"), [(2.0, True), (1.5, False)])
def test_the_trial_takes_the_faster_one(numpy_seconds: float, radix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The radix sort takes a second; beside another sort it would take 1.7."""
    clock = iter((0.0, 1.0, 1.0 + numpy_seconds))
    monkeypatch.setattr("assay.metrics.cpu_sort.time.perf_counter", lambda: next(clock))
    assert cpu_sort._radix_beats_numpy.__wrapped__() is radix
