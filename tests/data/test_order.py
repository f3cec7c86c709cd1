"""The order of the data: every example once an epoch, and nothing but the arguments matters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from assay.data.order import _permutation, held_out, indices


@given(st.integers(1, 40), st.integers(1, 100), st.integers(0, 2**70), st.integers(1, 4))
def test_each_epoch_has_every_example_once(count: int, batch: int, seed: int, epochs: int) -> None:
    steps = -(-count * epochs // batch)
    seen = torch.cat([indices(count, batch, seed, step) for step in range(steps)])
    assert seen.dtype == torch.int64
    for epoch in seen[: count * epochs].reshape(epochs, count):
        assert epoch.sort().values.tolist() == list(range(count))


def test_any_step_first() -> None:
    """A resumed run asks for its step first, in a process that has seen nothing."""
    here = [indices(100, 7, 3, step).tolist() for step in (40, 0, 14)]
    _permutation.cache_clear()
    torch.manual_seed(1)
    assert [indices(100, 7, 3, step).tolist() for step in (14, 40, 0)] == [here[2], here[0], here[1]]
    assert here[1] == [49, 61, 42, 11, 54, 37, 22]  # the same in every process, on every machine


def test_other_seeds_and_epochs_are_other_orders() -> None:
    orders = [indices(50, 50, seed, step).tolist() for seed in range(4) for step in range(4)]
    assert len({tuple(order) for order in orders}) == 16
    first = indices(50, 50, 0, 0)
    first[:] = 0  # what is given out is not the cache
    assert indices(50, 50, 0, 0).tolist() == orders[0]


def test_the_order_is_fair() -> None:
    places = torch.stack([indices(5, 5, seed, 0) for seed in range(3000)])
    for place in places.T:
        assert stats.chisquare(torch.bincount(place, minlength=5).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("count", "share", "held"), [(10, 0.2, 2), (10, 0.0, 0), (10, 0.01, 1), (2, 0.5, 1), (3944, 0.05, 197)]
)
def test_held_out(count: int, share: float, held: int) -> None:
    train, test = held_out(count, share, 1)
    assert (len(train), len(test)) == (count - held, held)
    assert sorted(train.tolist() + test.tolist()) == list(range(count))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(test, held_out(count, share, 1)[1])


def test_held_out_depends_on_the_seed_and_not_on_the_order() -> None:
    test = held_out(1000, 0.1, 0)[1]
    assert not torch.equal(test, held_out(1000, 0.1, 1)[1])
    assert len(set(test.tolist()) & set(indices(1000, 100, 0, 0).tolist())) < 30  # 10 by chance


def test_what_is_refused() -> None:
    for count, batch, step, name in ((0, 1, 0, "count"), (1, 0, 0, "batch"), (1, 1, -1, "step"), (True, 1, 0, "count")):
        with pytest.raises(ValueError, match=f"{name} must be a whole number"):
            indices(count, batch, 0, step)
    with pytest.raises(ValueError, match="seed must be"):
        indices(4, 2, -1, 0)
    with pytest.raises(ValueError, match="share must be"):
        held_out(10, 1.0, 0)
    with pytest.raises(ValueError, match="1 of 1 are held out"):
        held_out(1, 0.5, 0)
