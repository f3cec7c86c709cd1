"""Every implementation against ml_dtypes, numpy, torch and gfloat, at every code point and midpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from assay.formats import Format, get
from assay.formats.modes import Rounding

from .oracles import NUMPY_DTYPES, by_gfloat, by_numpy
from .probes import probes, random_bits, special_values
from .twins import DETERMINISTIC, TENSOR_TWINS, TWINS, Array, Twin, assert_same, scalar

CARRIERS = [np.float32, np.float64]
SMALL = [name for name in NUMPY_DTYPES if get(name).bits <= 8]
WITH_NAN = [name for name in SMALL if get(name).nan != "none"]


def thinned(twin: Twin, x: Array) -> Array:
    """The scalar version is slow by design: of the large sets it gets a sample."""
    sample: Array = x[::41].copy() if twin is scalar and x.size > 20_000 else x
    return sample


def without_nan(x: Array) -> Array:
    kept: Array = x[~np.isnan(x)]
    return kept


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_nearest_even_is_that_of_ml_dtypes(twin: Twin, name: str) -> None:
    x = thinned(twin, probes(name, np.float32))
    if get(name).nan == "none":  # ml_dtypes turns NaN into -0 there; we keep it
        x = without_nan(x)
    assert_same(twin(x, name, "nearest_even", False), by_numpy(x, name), x)


@pytest.mark.parametrize("twin", TENSOR_TWINS)
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_nearest_even_of_random_bits_is_that_of_ml_dtypes(twin: Twin, name: str) -> None:
    x = random_bits(300_000, np.float32)
    if get(name).nan == "none":
        x = without_nan(x)
    assert_same(twin(x, name, "nearest_even", False), by_numpy(x, name), x)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", ["fp16", "bf16", *WITH_NAN])
def test_every_direction_is_that_of_gfloat(
    twin: Twin, name: str, rounding: Rounding, saturate: bool, carrier: type[np.floating]
) -> None:
    x = thinned(twin, probes(name, carrier))
    assert_same(twin(x, name, rounding, saturate), by_gfloat(x, name, rounding, saturate), x)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", ["fp6_e2m3", "fp6_e3m2", "fp4_e2m1"])
def test_formats_without_special_codes_always_saturate(
    twin: Twin, name: str, rounding: Rounding, carrier: type[np.floating]
) -> None:
    x = without_nan(probes(name, carrier))
    expected = by_gfloat(x, name, rounding, True)
    assert_same(twin(x, name, rounding, True), expected, x)
    assert_same(twin(x, name, rounding, False), expected, x)


@pytest.mark.parametrize("twin", TENSOR_TWINS)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", ["tf32", "e5m7", "e6m9", "e7m22", "e8m13", "e8m22", "e2m12"])
def test_formats_that_numpy_lacks_are_those_of_gfloat(
    twin: Twin, name: str, rounding: Rounding, carrier: type[np.floating]
) -> None:
    near_one = np.random.default_rng(1).standard_normal(10_000).astype(carrier)
    x = np.concatenate([random_bits(30_000, carrier), near_one, special_values(carrier)])
    assert_same(twin(x, name, rounding, False), by_gfloat(x, name, rounding, False), x)


@pytest.mark.parametrize("twin", TWINS)
def test_tf32_ties(twin: Twin) -> None:
    kept = np.arange(1 << 11, dtype=np.uint32) << 13  # every tf32 mantissa, and one exponent bit
    bits = np.concatenate([kept + offset for offset in (0, 0x0FFF, 0x1000, 0x1001)]) + np.uint32(0x3F000000)
    x = bits.view(np.float32)
    assert_same(twin(x, "tf32", "nearest_even", False), by_gfloat(x, "tf32", "nearest_even", False), x)


@pytest.mark.parametrize("twin", TWINS)
def test_fp64_to_fp32_is_the_cast_of_numpy(twin: Twin) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal(4000) * 2.0 ** rng.integers(-152, 130, 4000)
    x = np.concatenate([x, random_bits(1000, np.float64), special_values(np.float64)])
    with np.errstate(all="ignore"):
        expected = x.astype(np.float32).astype(np.float64)
    assert_same(twin(x, "fp32", "nearest_even", False), expected, x)


@pytest.mark.parametrize("twin", TENSOR_TWINS)
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_native_formats_are_the_casts_of_torch(twin: Twin, name: str, dtype: torch.dtype) -> None:
    x = np.concatenate([probes(name, np.float32), random_bits(100_000, np.float32)])
    expected = torch.from_numpy(x).to(dtype).double().numpy()
    assert_same(twin(x, name, "nearest_even", False), expected, x)


@pytest.mark.parametrize("twin", TWINS)
def test_one_bit_of_precision_follows_ieee(twin: Twin) -> None:
    # Both neighbours of a tie are odd: IEEE 754-2019 takes the larger. Zero, however, is even.
    x = np.array([1.5, 3.0, 6.0, -1.5, 1.4, 2.0**-3, 2.0**-2 + 2.0**-3], dtype=np.float32)
    expected = np.array([2.0, 4.0, 8.0, -2.0, 1.0, 0.0, 0.5])
    no_mantissa = Format(exponent=3, mantissa=0)  # smallest value 2^-2
    assert_same(twin(x, no_mantissa, "nearest_even", False), expected, x)
    same_range_as_fp32 = np.array([1.5, 3.0, -6.0, 2.0**-127, 2.0**-127 * 1.5], dtype=np.float32)
    wide = np.array([2.0, 4.0, -8.0, 0.0, 2.0**-126])
    assert_same(twin(same_range_as_fp32, "e8m0", "nearest_even", False), wide, same_range_as_fp32)
