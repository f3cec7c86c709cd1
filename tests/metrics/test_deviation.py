"""deviation() against numpy in FP64 and math.fsum."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.metrics import chunks, order_statistics
from assay.metrics.deviation import Deviation, deviation

INF, NAN = math.inf, math.nan


def pair(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(*shape, generator=generator, dtype=torch.float64)
    actual = reference + 0.01 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return actual.to(dtype), reference.to(dtype)


def assert_matches_numpy(found: Deviation, actual: Tensor, reference: Tensor) -> None:
    a, r = actual.double().numpy().ravel(), reference.double().numpy().ravel()
    d = a - r
    n = len(d)
    assert found.count == found.finite == n
    assert found.max == np.abs(d).max()
    assert found.max_index == np.unravel_index(np.abs(d).argmax(), tuple(actual.shape))
    assert found.mean == pytest.approx(math.fsum(np.abs(d)) / n, rel=1e-13)
    assert found.bias == pytest.approx(math.fsum(d) / n, rel=1e-10, abs=1e-16)
    assert found.std == pytest.approx(d.std(), rel=1e-12)
    assert found.rmse == pytest.approx(math.sqrt(math.fsum(d * d) / n), rel=1e-13)
    assert found.relative == pytest.approx(np.linalg.norm(d) / np.linalg.norm(r), rel=1e-12)
    assert found.cosine == pytest.approx(a @ r / np.linalg.norm(a) / np.linalg.norm(r), rel=1e-12)
    assert found.sqnr == pytest.approx(10 * math.log10((r @ r) / (d @ d)), rel=1e-12)
    for level, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(np.abs(d), level), rel=1e-13)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_every_figure_in_every_dtype(dtype: torch.dtype) -> None:
    actual, reference = pair(7, 11, 13, dtype=dtype)
    assert_matches_numpy(deviation(actual, reference), actual, reference)


def test_mixed_dtypes() -> None:
    actual, reference = pair(1000)[0].bfloat16(), pair(1000, dtype=torch.float64)[1]
    assert_matches_numpy(deviation(actual, reference), actual, reference)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_sizes_around_the_chunk(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_CHUNK", 64)
    actual, reference = pair(n)
    assert_matches_numpy(deviation(actual, reference), actual, reference)


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**20])
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "flipped halves"])
def test_strides_and_chunks_change_nothing(layout: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_CHUNK", chunk)
    actual, reference = pair(6, 10, 4)
    if layout == "transposed":
        actual, reference = actual.permute(2, 0, 1), reference.permute(2, 0, 1).contiguous()
    elif layout == "strided":
        actual, reference = actual[:, ::3], reference[:, ::3]
    elif layout == "expanded":
        reference = reference[:, :1].expand(6, 10, 4)
    else:
        actual, reference = actual[3:], reference[:3]
    assert_matches_numpy(deviation(actual, reference), actual, reference)


def test_quantiles_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_CHUNK", 500)
    monkeypatch.setattr(order_statistics, "GATHER_LIMIT", 16)
    actual, reference = pair(4321)
    levels = (0.0, 0.1, 0.5, 0.99, 0.9999, 1.0)
    found = deviation(actual, reference, quantiles=levels)
    d = (actual.double() - reference.double()).abs().numpy()
    assert found.quantiles == pytest.approx({q: float(np.quantile(d, q)) for q in levels}, rel=1e-14)


def test_the_same_thing_twice_is_exactly_zero() -> None:
    x = pair(100)[0]
    found = deviation(x, x.clone(), "fp32")
    zeros = (found.max, found.mean, found.std, found.rmse, found.relative, found.bias, found.ulp_max)
    assert set(zeros) == {0}
    assert found.bias_interval == (0.0, 0.0)
    assert found.sqnr == INF
    assert found.cosine == pytest.approx(1, rel=1e-15)
    assert set(found.quantiles.values()) == {0.0}


def test_variance_does_not_cancel() -> None:
    """A large common offset must not eat the small spread: E[d²] - E[d]² would leave nothing here."""
    offset = torch.full((10_000,), 1e9, dtype=torch.float64)
    spread = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(5000) * 1e-3
    found = deviation(offset + spread, torch.zeros_like(offset))
    assert found.std == pytest.approx(1e-3, rel=1e-4)  # 1e9 ± 1e-3 is itself rounded to 1e-7


def test_rmse_splits_into_bias_and_std() -> None:
    actual, reference = pair(999)
    found = deviation(actual + 0.3, reference)
    assert found.rmse**2 == pytest.approx(found.bias**2 + found.std**2, rel=1e-12)


def test_bias_interval_is_the_normal_one() -> None:
    actual, reference = pair(400, dtype=torch.float64)
    d = (actual - reference).numpy()
    half = NormalDist().inv_cdf(0.995) * d.std(ddof=1) / math.sqrt(len(d))
    low, high = deviation(actual, reference, confidence=0.99).bias_interval
    assert (low, high) == pytest.approx((d.mean() - half, d.mean() + half), rel=1e-10)


def test_bias_interval_covers_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(400):
        noise = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        low, high = deviation(noise, torch.zeros_like(noise), confidence=0.9, quantiles=()).bias_interval
        covered += low <= 0 <= high
    # Binomial(400, 0.9) has a standard deviation of 6; n = 50 costs the normal interval about 0.6%.
    assert abs(covered - 360) < 4 * 6


def test_one_element_says_nothing_about_its_bias() -> None:
    found = deviation(torch.tensor(1.5), torch.tensor(1.0))
    assert found.max == 0.5
    assert found.max_index == ()
    assert found.bias_interval == (-INF, INF)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize(
    ("a", "r", "mismatches"),
    [
        (NAN, 1.0, 1),
        (1.0, NAN, 1),
        (INF, 1.0, 1),
        (INF, -INF, 1),
        (INF, NAN, 1),
        (INF, INF, 0),
        (NAN, NAN, 0),
    ],
)
def test_nonfinite_pairs(a: float, r: float, mismatches: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_CHUNK", chunk)
    actual = torch.tensor([[1.0, 2.0, 3.5], [a, 5.0, 6.0]])
    reference = torch.tensor([[1.0, 2.0, 3.0], [r, 5.0, 6.25]])
    found = deviation(actual, reference, "bf16")
    assert found.nonfinite_mismatch == mismatches
    assert (found.count, found.finite) == (6, 5)
    assert (found.nan_actual, found.nan_reference) == (math.isnan(a), math.isnan(r))
    assert (found.inf_actual, found.inf_reference) == (math.isinf(a), math.isinf(r))
    assert found.max == (INF if mismatches else 0.5)
    assert found.ulp_max == (INF if mismatches else 32.0)
    assert found.max_index == ((1, 0) if mismatches else (0, 2))
    assert found.mean == 0.15  # over the finite pairs
    assert found.quantiles[0.5] == 0


def test_position_of_the_maximum_beside_a_nan() -> None:
    actual = torch.tensor([NAN, 0.0, NAN, 0.0, 2.0, 0.0])
    reference = torch.tensor([NAN, 0.0, NAN, 0.0, 0.0, 0.0])
    assert deviation(actual, reference).max_index == (4,)


def test_nothing_finite_passes_no_bound() -> None:
    nothing = torch.full((3,), NAN)
    found = deviation(nothing, nothing, "bf16")
    assert found.nonfinite_mismatch == 0
    assert not found.max <= 1e300
    assert all(math.isnan(v) for v in (found.mean, found.std, found.rmse, found.sqnr, found.quantiles[0.5]))


def test_zero_reference() -> None:
    zeros, ones = torch.zeros(4), torch.ones(4)
    found = deviation(ones, zeros)
    assert (found.relative, found.sqnr) == (INF, -INF)
    assert math.isnan(found.cosine)
    assert deviation(zeros, zeros).relative == 0


def test_beyond_the_range_of_fp64_is_infinite_not_wrong() -> None:
    big = torch.full((3,), 1e308, dtype=torch.float64)
    found = deviation(big, -big)
    assert found.max == INF
    assert found.nonfinite_mismatch == 0
    assert found.rmse == INF


def test_as_dict_is_json() -> None:
    found = deviation(torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), "bf16")
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["max"] == "inf"
    assert float(values["max"]) == INF
    assert values["max_index"] == [1]
    assert values["quantiles"] == {"0.5": 0.0, "0.9": 0.0, "0.99": 0.0, "0.999": 0.0}
    assert values["format"] == "bf16"


def test_gradients_are_left_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    assert deviation(x * 2, x).max == 1


def test_refusals() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"torch\.from_numpy"):
        deviation(np.ones(3), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one shape, got \(3,\) and \(4,\)"):
        deviation(x, torch.ones(4))
    with pytest.raises(ValueError, match=r"floating-point dtype, got torch\.int64"):
        deviation(x, torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one element"):
        deviation(torch.ones(0), torch.ones(0))
    with pytest.raises(ValueError, match="one device, got cpu and meta"):
        deviation(x, torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="quantiles must lie"):
        deviation(x, x, quantiles=(99,))
    with pytest.raises(ValueError, match="confidence must lie"):
        deviation(x, x, confidence=95)
    with pytest.raises(ValueError, match="Unknown format"):
        deviation(x, x, "bf17")


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.tuples(*[st.floats(-1e3, 1e3, width=32)] * 2), min_size=1, max_size=60),
    chunk=st.integers(1, 30),
)
def test_chunking_never_shows(values: list[tuple[float, float]], chunk: int) -> None:
    actual, reference = torch.tensor(values).T
    whole = deviation(actual, reference, "fp16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CPU_CHUNK", chunk)
        patch.setattr(order_statistics, "GATHER_LIMIT", 5)
        cut = deviation(actual, reference, "fp16")
    assert (cut.max, cut.max_index, cut.ulp_max) == (whole.max, whole.max_index, whole.ulp_max)
    assert cut.quantiles == whole.quantiles
    for name in ("mean", "std", "rmse", "bias", "relative", "ulp_mean"):
        assert getattr(cut, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=1e-10, nan_ok=True)
