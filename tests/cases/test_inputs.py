"""Inputs: what their names promise."""

from __future__ import annotations

import pytest
import torch

from assay.cases.attention.inputs import DISTRIBUTIONS, check_inputs, draw_inputs

SHAPE = (2, 3, 257, 16)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_same_seed_gives_the_same_numbers(name: str) -> None:
    first, again, other = (draw_inputs(name, SHAPE, seed) for seed in (1, 1, 2))
    for x, y, z in zip(first, again, other, strict=True):
        assert x.shape == SHAPE
        assert x.dtype == torch.float64
        assert torch.equal(x, y)
        assert not torch.equal(x, z)
        assert x.isfinite().all()


def test_uniform_and_normal() -> None:
    uniform, normal = (torch.stack(draw_inputs(name, SHAPE, 0)[:3]) for name in ("uniform", "normal"))
    assert 0 <= uniform.min() < 0.01 < 0.99 < uniform.max() < 1
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02


def test_outliers_are_one_in_a_thousand_with_variance_100() -> None:
    x = draw_inputs("outliers", (1, 4, 4096, 64), 0).q
    far = x[x.abs() > 6]  # N(0, 1) reaches 6 once in 5e8, N(0, 101) in 55 of 100
    assert far.numel() / x.numel() == pytest.approx(0.001 * 0.5505, rel=0.1)
    assert float(x.var()) == pytest.approx(1 + 0.1, rel=0.02)


def test_every_row_of_tied_has_its_largest_score_twice() -> None:
    q, k, _, _ = draw_inputs("tied", SHAPE, 0)
    top = (q @ k.mT)[..., :256].sort(-1, descending=True).values
    assert torch.equal(top[..., 0], top[..., 1])


def test_low_rank_is_of_rank_four() -> None:
    q, k, v, _ = draw_inputs("low_rank", SHAPE, 0)
    assert torch.linalg.matrix_rank(q[0, 0]) == torch.linalg.matrix_rank(k[0, 0]) == 4
    assert torch.linalg.matrix_rank(v[0, 0]) == 16
    assert float(q.std()) == pytest.approx(1, rel=0.25)


def test_large_logits_have_a_standard_deviation_of_16() -> None:
    q, k, _, _ = draw_inputs("large_logits", (1, 2, 512, 64), 0)
    assert float((q @ k.mT / 8).std()) == pytest.approx(16, rel=0.1)


def test_bad_inputs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Unknown inputs 'unifrom'. Did you mean uniform"):
        check_inputs("unifrom")
    with pytest.raises(ValueError, match="is not a file"):
        check_inputs("file:/nowhere/at.all")
