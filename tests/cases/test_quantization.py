from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from assay import Plan, deviation, formats, golden_attention, tiled_attention
from assay.cases.attention.quantization import Quantization, quantize, rotate
from tests.cases.inputs import qkv

E4M3 = formats.get("fp8_e4m3")


def outliers(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """FA3's test inputs: N(0, 1) + N(0, 100)·Bernoulli(0.001)."""
    generator = torch.Generator().manual_seed(seed)
    base, spike = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 10
    return base + spike * (torch.rand(shape, generator=generator) < 0.001)


def test_rotation_is_scipys_hadamard_with_signs() -> None:
    x = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signs = torch.randint(0, 2, (32,), generator=torch.Generator().manual_seed(5)).double() * 2 - 1
    expected = (x * signs) @ torch.from_numpy(hadamard(32).astype(np.float64)) / 32**0.5
    torch.testing.assert_close(rotate(x, seed=5), expected, rtol=0, atol=1e-14)


def test_rotation_keeps_scores_and_spreads_outliers() -> None:
    q, k = outliers(0, (1, 2, 64, 128)).double(), outliers(1, (1, 2, 64, 128)).double()
    scores = q @ k.transpose(-1, -2)
    rotated = rotate(q, 3) @ rotate(k, 3).transpose(-1, -2)
    torch.testing.assert_close(rotated, scores, rtol=0, atol=1e-11)
    assert rotate(q, 3).abs().max() < 0.5 * q.abs().max()


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_scales_bring_the_largest_value_to_the_largest_code(scales: str) -> None:
    x = outliers(0, (2, 3, 70, 16))
    values, scale = quantize(x, E4M3, scales, block=32)  # type: ignore[arg-type]
    assert scale.shape == (2, 3, 70, 1)
    assert values.abs().max() == 448.0
    on_grid = values.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(on_grid, values.numpy())
    groups = {"tensor": 1, "head": 6, "block": 18}[scales]
    assert len(scale.unique()) == groups
    assert ((values * scale - x).abs() <= x.abs() * 2**-4 + scale * 2**-10).all()  # half an ULP, or subnormal


def test_zeros_have_no_scale_to_divide_by() -> None:
    values, scale = quantize(torch.zeros(1, 1, 8, 4), E4M3, "block", block=4)
    assert (values == 0).all()
    assert (scale == 1).all()


def test_fa3s_scheme_halves_the_error_on_outliers() -> None:
    """FA3's published comparison: per-block scales and rotation against plain per-tensor FP8."""
    q, k, v = (outliers(seed, (1, 4, 512, 128)) for seed in range(3))
    golden = golden_attention(q, k, v)

    def rmse(**kwargs: object) -> float:
        out = tiled_attention(
            q,
            k,
            v,
            plan=Plan.fa3_fp8(output="fp32"),
            block=(128, 128),
            probability_shift=8,
            quantization=Quantization(**kwargs),  # type: ignore[arg-type]
        )
        return deviation(out, golden).rmse

    plain, rotated = rmse(scales="tensor"), rmse(scales="block", incoherent=True)
    assert rmse(scales="block") < plain
    assert rotated < 0.7 * plain


def test_scaling_p_up_keeps_its_small_values() -> None:
    """Without the shift, P under 2^-10 is lost to E4M3's subnormals; with 2^8 it is kept."""
    q, k, v = qkv(64, 1024, dim=32)
    golden = golden_attention(q, k, v)
    plan = Plan.shipped("fp32").replace(probabilities="fp8_e4m3")
    plain = deviation(tiled_attention(q, k, v, plan=plan), golden).rmse
    shifted = deviation(tiled_attention(q, k, v, plan=plan, probability_shift=8), golden).rmse
    assert shifted < plain


def test_nan_and_inf_do_not_set_the_scale_of_others() -> None:
    x = outliers(0, (1, 1, 64, 16)) * 1000
    clean, scale = quantize(x, E4M3, "tensor", block=32)
    for bad in (float("nan"), float("inf")):
        y = x.clone()
        y[0, 0, 5, 3] = bad
        values, other = quantize(y, E4M3, "tensor", block=32)
        assert torch.equal(other, scale)
        assert not torch.isfinite(values[0, 0, 5, 3])
        values[0, 0, 5, 3] = clean[0, 0, 5, 3]
        assert torch.equal(values, clean)
