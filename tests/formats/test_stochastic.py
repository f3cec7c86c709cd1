"""Stochastic rounding: unbiased, between the two neighbours, repeatable."""

from __future__ import annotations

import math

import pytest
import torch

from assay.formats.rounding import round_to

from .twins import GPU

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=GPU)]
COUNT = 200_000


def generator(device: str, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("format", "value"),
    [
        ("fp8_e4m3", 1.03),
        ("fp8_e4m3", -300.0),
        ("fp8_e4m3", 2.0**-9 * 0.3),  # between zero and the smallest subnormal
        ("bf16", 0.1),
        ("fp16", -(2.0**-24) * 5.75),
        ("tf32", 3.0004),
        ("tf32", 2.0**-136 * 0.625),  # between zero and tf32's smallest subnormal
    ],
)
def test_mean_is_the_value(device: str, dtype: torch.dtype, format: str, value: float) -> None:
    x = torch.full((COUNT,), value, dtype=dtype, device=device)
    exact = x[0].item()
    low, high = round_to(x[:1], format, "down").item(), round_to(x[:1], format, "up").item()
    rounded = round_to(x, format, "stochastic", generator=generator(device)).double()
    assert set(rounded.tolist()) == {low, high}
    spacing, fraction = high - low, (exact - low) / (high - low)
    # Six standard deviations of the mean of COUNT draws, and the 2^-24 by which 24 random bits are coarse.
    bound = 6 * math.sqrt(fraction * (1 - fraction) / COUNT) + 2.0**-24
    mean = (rounded / spacing).mean().item()
    assert abs(mean - exact / spacing) <= bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["fp8_e4m3", "bf16", "tf32", "fp4_e2m1", "e5m30"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_result_is_one_of_the_neighbours(device: str, format: str, dtype: torch.dtype) -> None:
    x = (torch.randn(50_000, dtype=dtype) * torch.logspace(-4, 0.5, 50_000, dtype=dtype)).to(device)
    rounded = round_to(x, format, "stochastic", generator=generator(device))
    down, up = round_to(x, format, "down"), round_to(x, format, "up")
    assert ((rounded == down) | (rounded == up)).all()
    values = rounded[rounded == rounded]
    assert torch.equal(round_to(values, format, "stochastic"), values)  # nothing to decide any more


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["fp8_e5m2", "tf32"])
def test_seed_decides(device: str, format: str) -> None:
    x = torch.randn(1_000_000, device=device)
    first = round_to(x, format, "stochastic", generator=generator(device, 1))
    again = round_to(x, format, "stochastic", generator=generator(device, 1))
    other = round_to(x, format, "stochastic", generator=generator(device, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("device", DEVICES)
def test_overflow_is_that_of_nearest(device: str) -> None:
    x = torch.full((10_000,), 60000.0, device=device)  # between the largest value and the next, 65536
    rounded = round_to(x, "fp8_e5m2", "stochastic", generator=generator(device))
    assert set(rounded.tolist()) == {57344.0, math.inf}
    assert (round_to(x, "fp8_e5m2", "stochastic", saturate=True) == 57344.0).all()


def test_generator_must_be_on_the_device_of_x() -> None:
    with pytest.raises(ValueError, match="must be on the device of x"):
        round_to(torch.zeros(2, device="meta"), "bf16", "stochastic", generator=torch.Generator())
