"""Deterministic kernels inside, what was there before outside; randomness by seed and step."""

from __future__ import annotations

import pytest
import torch

from assay.training.determinism import deterministic, generator, mixed


def settings() -> tuple[bool, bool, bool, int]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_num_threads(),
    )


def test_settings_come_back_even_after_an_error() -> None:
    torch.set_num_threads(2)
    before = settings()
    assert not before[0]
    with deterministic():
        assert settings() == (True, False, False, 1)
    assert settings() == before
    with pytest.raises(KeyError), deterministic():
        raise KeyError
    assert settings() == before


def test_seeds_are_the_same_everywhere() -> None:
    assert mixed(3, "step", 7) == mixed(3, "step", 7) == 634278347620228504
    assert len({mixed(a, b) for a in range(30) for b in range(30)}) == 900
    assert mixed(1, "2") != mixed("1", 2)
    assert 0 <= mixed("a") < 2**63


def test_a_generator_is_of_its_parts_alone() -> None:
    first = torch.randn(5, generator=generator(1, "batch", 2))
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(5, generator=generator(1, "batch", 2)))
    assert not torch.equal(first, torch.randn(5, generator=generator(1, "batch", 3)))
