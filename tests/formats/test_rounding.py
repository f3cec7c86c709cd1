"""`round_to` as a function: shapes, dtypes, what it leaves alone, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from assay.formats import Format
from assay.formats.rounding import round_to

from .twins import GPU

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


LAYOUTS = {
    "transposed": lambda device: torch.randn(6, 10, device=device).t()[::2],
    "strided vector": lambda device: torch.randn(20, device=device)[::2],
    "one value expanded": lambda device: torch.randn(1, device=device).expand(7, 5000),
    "a row expanded": lambda device: torch.randn(1, 9, device=device).expand(4, 9),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "tf32", "fp32"])
def test_any_layout_and_the_input_untouched(format: str, layout: str, device: str) -> None:
    x = LAYOUTS[layout](device)
    before = x.clone()
    rounded = round_to(x, format)
    assert rounded.shape == x.shape
    assert rounded.is_contiguous()
    assert rounded.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)
    assert torch.equal(rounded, round_to(x.contiguous(), format))


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "tf32", "fp32"])
def test_empty_and_zero_dimensional(format: str) -> None:
    assert round_to(torch.empty(3, 0), format).shape == (3, 0)
    assert round_to(torch.tensor(1.0), format).shape == ()
    assert round_to(torch.tensor(1.0), format).item() == 1.0


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3", "tf32"])
def test_large_tensors_are_rounded_piece_by_piece(format: str) -> None:
    x = torch.randn((1 << 21) + 7)
    x[-1] = 1e30  # only the last piece has an overflow to look after
    pieces = torch.cat([round_to(piece, format) for piece in x.chunk(11)])
    torch.testing.assert_close(round_to(x, format), pieces, rtol=0, atol=0, equal_nan=True)


def test_result_never_requires_grad() -> None:
    x = torch.randn(5, requires_grad=True)
    for format in ("bf16", "fp8_e4m3", "fp64"):
        assert not round_to(x, format).requires_grad


@pytest.mark.parametrize("dtype", FLOATS)
def test_coarser_formats_keep_the_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(1000).to(dtype)
    rounded = round_to(x, "fp8_e4m3")
    assert rounded.dtype == dtype
    assert torch.equal(rounded.double(), round_to(x.double(), "fp8_e4m3"))


def test_finer_formats_change_nothing() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.tensor([1.5, -0.0, torch.inf, -3e-5], dtype=dtype)
        same = round_to(x, "fp64")
        assert same.dtype == dtype
        assert torch.equal(same, x)
        assert same.data_ptr() != x.data_ptr()


def test_results_that_do_not_fit_are_promoted() -> None:
    largest_half = torch.tensor([65504.0], dtype=torch.float16)
    rounded = round_to(largest_half, "bf16")
    assert (rounded.dtype, rounded.item()) == (torch.float32, 65536.0)
    saturated = round_to(torch.tensor([1e30], dtype=torch.bfloat16), "fp16", saturate=True)
    assert (saturated.dtype, saturated.item()) == (torch.float32, 65504.0)
    beyond_single = round_to(torch.tensor([torch.finfo(torch.float32).max]), "e9m3")
    assert (beyond_single.dtype, beyond_single.item()) == (torch.float64, 2.0**128)
    assert round_to(torch.tensor([torch.inf]), "fp64", saturate=True).item() == torch.finfo(torch.float64).max


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
        ("fp8_e5m2", torch.float16),
        ("fp4_e2m1", torch.float8_e4m3fn),
        ("tf32", torch.float64),
    ],
)
def test_result_in_a_dtype_of_choice(format: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(1000) * 30, torch.tensor([0.0, -0.0, torch.nan])])
    stored = round_to(x, format, dtype=dtype)
    assert stored.dtype == dtype
    torch.testing.assert_close(stored.double(), round_to(x, format).double(), rtol=0, atol=0, equal_nan=True)


def test_format_given_by_its_bits_is_the_named_one() -> None:
    x = torch.randn(1000)
    assert torch.equal(round_to(x, Format(exponent=8, mantissa=7)), round_to(x, "bf16"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.arange(3)}, "Only .* tensors can be rounded, got torch.int64"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "got torch.complex64"),
        ({"x": torch.zeros(2, dtype=torch.bool)}, "got torch.bool"),
        ({"x": 1.5}, "x must be a torch.Tensor, got float"),
        ({"format": "bf61"}, "Did you mean bf16"),
        ({"rounding": "nearest-evn"}, "Did you mean 'nearest_even'.*stochastic"),
        ({"generator": torch.Generator()}, "only used by rounding='stochastic'"),
        ({"dtype": torch.float16}, "must hold every value of bf16, but torch.float16 does not"),
        ({"dtype": torch.int8}, "got torch.int8"),
    ],
)
def test_refusals_say_what_to_do(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"x": torch.zeros(2), "format": "bf16"}
    with pytest.raises(ValueError, match=message):
        round_to(**(good | arguments))


def test_rounding_on_cpu_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, assay\n"
        "assert assay.round_to(torch.tensor([1.0625]), 'fp8_e4m3').item() == 1.0\n"
        "assert 'assay.formats.triton_rounding' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_looking_at_a_format_needs_no_torch() -> None:
    code = (
        "import sys, assay\n"
        "assert assay.Format(exponent=5, mantissa=10).max == 65504\n"
        "assert assay.formats.round_scalar(1.0625, 'fp8_e4m3') == 1.0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
