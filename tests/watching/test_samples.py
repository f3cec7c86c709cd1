"""Which elements a sample has."""

from __future__ import annotations

import pytest
import torch

from assay.watching.samples import SAMPLE, sampled


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
