"""The CUDA kernel and the device functions: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import assay.formats.rounding
from assay.formats import NAMED, Format, get
from assay.formats.dtypes import holds
from assay.formats.modes import Rounding
from assay.formats.rounding import round_to
from tests.interpreter import interpret

from .probes import random_bits, special_values
from .twins import DETERMINISTIC, NEEDS_GPU, assert_same

FORMATS = [
    *NAMED.values(),
    Format(exponent=5, mantissa=3, subnormals=False),
    Format(exponent=8, mantissa=10, subnormals=False),
    Format(exponent=8, mantissa=0),
    Format(exponent=5, mantissa=23),
    Format(exponent=5, mantissa=30),
    Format(exponent=8, mantissa=4, infinities=False, nan="none"),
    Format(exponent=11, mantissa=20),
]


def test_interpreted_kernels_agree_with_plain_torch() -> None:
    interpret("tests.formats.interpreted_kernels")


def test_device_functions_refuse_what_fp32_cannot_hold() -> None:
    functions = pytest.importorskip("assay.formats.triton_functions")
    with pytest.raises(ValueError, match="a format that fp32 holds, got e9m3"):
        functions.device_constants(get("e9m3"))


def every_kind_of_value(dtype: torch.dtype, count: int) -> torch.Tensor:
    carrier = np.float64 if dtype == torch.float64 else np.float32
    near_one = np.random.default_rng(0).standard_normal(count).astype(carrier)
    x = np.concatenate([random_bits(count, carrier), near_one, special_values(carrier)])
    return torch.from_numpy(x).to(dtype)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f}-{f.nan}-{f.subnormals}")
def test_kernel_is_the_cpu_code(format: Format, dtype: torch.dtype) -> None:
    x = every_kind_of_value(dtype, 100_003)
    for rounding in DETERMINISTIC:
        for saturate in (False, True):
            expected = round_to(x, format, rounding, saturate)
            actual = round_to(x.cuda(), format, rounding, saturate)
            assert actual.dtype == expected.dtype
            assert_same(actual.double().cpu().numpy(), expected.double().numpy(), x.double().numpy())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f}-{f.nan}-{f.subnormals}")
def test_device_functions_are_the_cpu_code(format: Format, saturate: bool) -> None:
    if not holds(torch.float32, format):
        pytest.skip("fp32 does not hold this format")
    from .block_kernel import round_in_a_kernel  # imports Triton

    x = every_kind_of_value(torch.float32, 4000)
    ways: list[tuple[bool, Rounding]] = [(False, "nearest_even"), (True, "toward_zero")]
    for cut, rounding in ways:
        actual = round_in_a_kernel(x.cuda(), format, cut=cut, saturate=saturate)
        expected = round_to(x, format, rounding, saturate)
        assert_same(actual.cpu().numpy(), expected.numpy(), x.numpy())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_stochastic_rounding_does_not_wait_for_the_device() -> None:
    x = torch.randn(1000, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    round_to(x, "bf16", "stochastic", generator=generator)  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        round_to(x, "bf16", "stochastic", generator=generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_without_triton_the_values_are_the_same(rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assay.formats.rounding, "_kernel_module", lambda: None)
    x = every_kind_of_value(torch.float32, 10_000)
    for format in ("bf16", "fp8_e4m3", "tf32", "fp4_e2m1"):
        for saturate in (False, True):
            actual = round_to(x.cuda(), format, rounding, saturate)
            assert_same(actual.cpu().numpy(), round_to(x, format, rounding, saturate).numpy(), x.numpy())
