"""Sines, cosines and rotary turns, against numpy and complex numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.models.positions import grid_sines, rotary_angles, rotate, sines

CPU = torch.device("cpu")


def by_complex_numbers(x: Tensor) -> Tensor:
    """Dimensions i and i + D/2 are a complex number, turned by its position."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2]).double(), 10_000.0 ** (-torch.arange(half).double() / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_rotary_turns() -> None:
    x = torch.randn(2, 3, 50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # An angle up to 49 in FP32 is off by half a unit of 2⁻¹⁸, and one more for its frequency.
    torch.testing.assert_close(rotate(x, rotary_angles(50, 16, CPU)), by_complex_numbers(x), atol=1e-4, rtol=0)


def test_only_distances_matter() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 1, 1, 20, 8).double()
    angles = rotary_angles(20, 8, CPU)
    scores = (rotate(q, angles) @ rotate(k, angles).mT)[0, 0]
    for distance in range(-19, 20):
        line = scores.diagonal(distance)
        torch.testing.assert_close(line, line[:1].expand_as(line), atol=1e-4, rtol=0)


def test_rotary_rounds_once() -> None:
    x = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = rotary_angles(300, 16, CPU)
    assert rotate(x, angles).equal(rotate(x.float(), angles).bfloat16())


def test_sines_are_sines() -> None:
    position = torch.tensor([0.0, 0.5, 999.0])
    angle = position.double().numpy()[:, None] * 10_000.0 ** (-np.arange(3) / 3)
    expected = np.concatenate((np.cos(angle), np.sin(angle)), axis=1)
    np.testing.assert_allclose(sines(position, 6).numpy(), expected, atol=1e-4)


def test_a_grid_tells_rows_from_columns() -> None:
    table = grid_sines(5, 8, CPU).reshape(5, 5, 8)
    line = sines(torch.arange(5), 4)
    for row in range(5):
        for column in range(5):
            assert table[row, column].equal(torch.cat((line[row], line[column])))
    assert torch.cdist(table.reshape(25, 8), table.reshape(25, 8)).fill_diagonal_(1).min() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_default_dtypes_change_nothing(dtype: torch.dtype) -> None:
    time = torch.rand(9, generator=torch.Generator().manual_seed(0)) * 1000
    expected = (*rotary_angles(40, 8, CPU), sines(time, 8), grid_sines(4, 8, CPU))
    with torch.autocast("cpu", dtype):
        found = (*rotary_angles(40, 8, CPU), sines(time, 8), grid_sines(4, 8, CPU))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = (*rotary_angles(40, 8, CPU), sines(time, 8), grid_sines(4, 8, CPU))
    finally:
        torch.set_default_dtype(before)
    for a, b, c in zip(expected, found, wide, strict=True):
        assert a.dtype == b.dtype == c.dtype == torch.float32
        assert a.equal(b)
        assert a.equal(c)
