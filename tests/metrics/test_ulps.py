"""ULP distances against the spacing that numpy and ml_dtypes know."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import DTypeLike

from assay.formats.catalog import get
from assay.metrics import chunks
from assay.metrics.ulps import ulp_distance, ulp_histogram

DTYPES = [("fp16", np.float16), ("fp32", np.float32), ("fp64", np.float64), ("bf16", ml_dtypes.bfloat16)]


def grid(dtype: DTypeLike) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Values of many binades: zero, subnormals, powers of two and their neighbours, both signs."""
    info = ml_dtypes.finfo(dtype)
    rng = np.random.default_rng(0)
    powers = np.exp2(np.arange(info.minexp - 3, info.maxexp - 1, dtype=np.float64))
    values = np.concatenate([[0.0], powers, powers * rng.uniform(1, 2, len(powers))]).astype(dtype)
    both: np.ndarray[tuple[int], np.dtype[np.float64]] = np.concatenate([values, -values]).astype(np.float64)
    return both


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_one_spacing_is_one_ulp(name: str, dtype: DTypeLike) -> None:
    values = grid(dtype)
    narrow = np.abs(values).astype(dtype)
    above = np.nextafter(narrow, np.asarray(np.inf, dtype=dtype)).astype(np.float64)
    spacing = above - np.abs(values)
    ulps = ulp_distance(torch.from_numpy(spacing), torch.from_numpy(values), get(name))
    assert torch.equal(ulps, torch.ones_like(ulps))


@pytest.mark.parametrize(("name", "dtype"), DTYPES[:3])
def test_numpy_spacing(name: str, dtype: DTypeLike) -> None:
    values = grid(dtype)
    spacing = np.spacing(np.abs(values).astype(dtype)).astype(np.float64)
    ulps = ulp_distance(torch.from_numpy(3.25 * spacing), torch.from_numpy(values), get(name))
    keep = spacing > np.finfo(np.float64).tiny  # 3.25 times a subnormal is rounded
    assert torch.equal(ulps[torch.from_numpy(keep)], torch.full((int(keep.sum()),), 3.25, dtype=torch.float64))


def test_steps_within_a_binade() -> None:
    codes = torch.arange(0x3F80, 0x4000, dtype=torch.int16)  # every bf16 in [1, 2)
    values = codes.view(torch.bfloat16).double()
    ulps = ulp_distance((values - 1).abs(), torch.ones_like(values), get("bf16"))
    assert torch.equal(ulps, torch.arange(128.0, dtype=torch.float64))


@pytest.mark.parametrize("chunk", [2, 1000])
def test_histogram(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_CHUNK", chunk)
    ulp = 2.0**-7
    steps = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 1000], dtype=torch.float64)
    odd = torch.tensor([float("nan"), float("nan"), float("inf"), -0.0, float("inf")], dtype=torch.float64)
    odd_reference = torch.tensor([float("nan"), 1.0, float("inf"), 0.0, 2.0], dtype=torch.float64)
    actual = torch.cat([1 + steps * ulp, odd])
    reference = torch.cat([torch.ones(len(steps), dtype=torch.float64), odd_reference])
    found = ulp_histogram(actual, reference, "bf16")
    assert found.counts == (2, 2, 2, 2, 2, 2)  # -0 against +0 is at distance 0
    assert found.count == 16
    assert found.bit_equal == 3  # 1, NaN, inf; not the zeros of different sign
    assert found.bit_equal_share == 3 / 16
    assert found.nonfinite_mismatch == 2
    assert sum(found.shares) == 12 / 16


def test_histogram_with_other_edges() -> None:
    actual = torch.tensor([1.0, 1.5], dtype=torch.bfloat16)
    found = ulp_histogram(actual, torch.ones(2, dtype=torch.bfloat16), "bf16", edges=(0, 64))
    assert found.counts == (1, 1, 0)


@pytest.mark.parametrize("edges", [(), (1.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_bad_edges(edges: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="edges must be ascending"):
        ulp_histogram(torch.ones(1), torch.ones(1), "bf16", edges=edges)
