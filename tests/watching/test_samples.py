"""Which elements a sample has, and what a GPU finds in them."""

from __future__ import annotations

import pytest
import scipy.stats
import torch

from assay.watching.samples import SAMPLE, sampled, together


@pytest.mark.parametrize(("batch", "length", "dim"), [(1, 1024, 64), (16, 1024, 64), (2, 300, 128), (3, 77, 40)])
def test_every_feature_is_met_about_as_often(batch: int, length: int, dim: int) -> None:
    x = torch.arange(dim).expand(batch, 5, length, dim).double()
    own, whole = sampled(x)
    for row in (*own, *whole):
        share = row.long().bincount(minlength=dim) / row.numel() * dim
        assert share.min() > 0.8
        assert share.max() < 1.2


def test_what_is_small_is_taken_whole() -> None:
    x = torch.randn(2, 3, 20, 16)
    own, whole = sampled(x)
    torch.testing.assert_close(own, x.transpose(0, 1).reshape(3, -1), rtol=0, atol=0)
    torch.testing.assert_close(whole, own.reshape(1, -1), rtol=0, atol=0)


def test_a_sample_stays_small() -> None:
    own, whole = sampled(torch.zeros(8, 4, 4096, 64))
    assert own.shape[1] <= SAMPLE + 8
    assert whole.shape[1] <= SAMPLE


def test_one_sort_for_rows_of_several_lengths() -> None:
    groups = [(torch.randn(rows, length).double(), torch.randn(rows, length).double()) for rows, length in SIZES]
    for (x, y), (q99, w1) in zip(groups, together(groups), strict=True):
        torch.testing.assert_close(q99, torch.quantile((x - y).abs(), 0.99, 1), rtol=1e-12, atol=0)
        expected = [scipy.stats.wasserstein_distance(a, b) for a, b in zip(x, y, strict=True)]
        assert w1.tolist() == pytest.approx(expected, rel=1e-12)


SIZES = ((3, 50), (2, 7), (1, 1), (4, 101))
