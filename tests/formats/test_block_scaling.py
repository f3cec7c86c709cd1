"""MX blocks against gfloat's, and at the ends of the scale's range."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from assay.formats.block_scaling import mx_scales, round_to_mx

gfloat = pytest.importorskip("gfloat")  # a GPU box may lack it; `make test` installs it
gfloat_formats = pytest.importorskip("gfloat.formats")

GFLOAT_BLOCKS = {
    "fp8_e5m2": gfloat_formats.format_info_mxfp8_e5m2,
    "fp8_e4m3": gfloat_formats.format_info_mxfp8_e4m3,
    "fp6_e3m2": gfloat_formats.format_info_mxfp6_e3m2,
    "fp6_e2m3": gfloat_formats.format_info_mxfp6_e2m3,
    "fp4_e2m1": gfloat_formats.format_info_mxfp4_e2m1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GFLOAT_BLOCKS)
def test_blocks_are_those_of_gfloat(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 32)) * 2.0 ** rng.integers(-140, 120, (40, 1))
    x = torch.tensor(rows, dtype=dtype)
    rounded, scales = round_to_mx(x, name), mx_scales(x, name)
    assert rounded.dtype == dtype
    for row, values, scale in zip(x.double().numpy(), rounded.double().numpy(), scales, strict=True):
        expected = gfloat.quantize_block(GFLOAT_BLOCKS[name], row, gfloat.compute_scale_amax)
        np.testing.assert_array_equal(values, expected)
        assert scale.item() == gfloat.compute_scale_amax(GFLOAT_BLOCKS[name].etype.emax, row)


def test_scales_are_e8m0() -> None:
    draws = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    x = draws * torch.logspace(-44, 37, 64, dtype=torch.float64)[:, None].float()
    scales = mx_scales(x, "fp4_e2m1").numpy()
    assert (scales.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32) == scales).all()


def test_scale_range_is_clamped() -> None:
    x = torch.tensor([1e300, 1e-300, 2.0**-130, 0.0], dtype=torch.float64)
    assert mx_scales(x, "fp4_e2m1", block=1).tolist() == [2.0**127, 2.0**-127, 2.0**-127, 2.0**-127]
    rounded = round_to_mx(x, "fp4_e2m1", block=1)
    # Saturated at the largest element; far under the smallest; a quarter of it, too little; zero.
    assert rounded.tolist() == [6 * 2.0**127, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_values_spoil_their_block_only(special: float) -> None:
    x = torch.ones(96)
    x[40] = special
    rounded = round_to_mx(x, "fp8_e4m3")
    assert rounded[32:64].isnan().all()
    assert (rounded[:32] == 1).all()
    assert (rounded[64:] == 1).all()
    assert mx_scales(x, "fp8_e4m3").isnan().tolist() == [False, True, False]


def test_zero_block_stays_zero_with_its_signs() -> None:
    rounded = round_to_mx(torch.tensor([0.0, -0.0]), "fp8_e4m3")
    assert rounded.tolist() == [0.0, 0.0]
    assert rounded.signbit().tolist() == [False, True]


def test_last_block_may_be_shorter() -> None:
    x = torch.randn(3, 70)
    rounded = round_to_mx(x, "fp8_e4m3")
    assert rounded.shape == x.shape
    assert mx_scales(x, "fp8_e4m3").shape == (3, 3)
    assert torch.equal(rounded[:, 64:], round_to_mx(x[:, 64:], "fp8_e4m3"))


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_other_dimensions(dim: int) -> None:
    x = torch.randn(40, 64, 3)
    expected = round_to_mx(x.movedim(dim, -1), "fp6_e3m2", block=16).movedim(-1, dim)
    assert torch.equal(round_to_mx(x, "fp6_e3m2", block=16, dim=dim), expected)
    assert torch.equal(
        mx_scales(x, "fp6_e3m2", block=16, dim=dim),
        mx_scales(x.movedim(dim, -1), "fp6_e3m2", block=16).movedim(-1, dim),
    )


def test_sixteen_bits_come_back_as_float32() -> None:
    x = torch.randn(64).bfloat16()
    assert torch.equal(round_to_mx(x, "fp4_e2m1"), round_to_mx(x.float(), "fp4_e2m1"))
    assert round_to_mx(x.float(), "fp16").dtype == torch.float64  # 2^-24 · 2^-127 is under fp32's smallest


def test_stochastic_blocks_are_repeatable() -> None:
    x = torch.randn(1000)
    seeded = [torch.Generator().manual_seed(3) for _ in range(2)]
    first, again = (round_to_mx(x, "fp4_e2m1", rounding="stochastic", generator=g) for g in seeded)
    assert torch.equal(first, again)


def test_empty() -> None:
    assert round_to_mx(torch.empty(0, 3), "fp4_e2m1", dim=0).shape == (0, 3)
    assert round_to_mx(torch.empty(3, 0), "fp4_e2m1").shape == (3, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.tensor(1.0)}, "at least one dimension"),
        ({"x": torch.arange(4)}, "got torch.int64"),
        ({"block": 0}, "block must be a positive number of values, got 0"),
        ({"block": 2.5}, "got 2.5"),
        ({"dim": 2}, "dim must be a dimension of x, which has 1, got 2"),
        ({"format": "fp5"}, "Unknown format 'fp5'"),
    ],
)
def test_refusals_say_what_to_do(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"x": torch.ones(4), "format": "fp4_e2m1"}
    with pytest.raises(ValueError, match=message):
        round_to_mx(**(good | arguments))
