from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from assay.metrics import cpu_sort


def values(count: int) -> torch.Tensor:
    """Every kind of FP32 but NaN: both signs, zeros, subnormals, infinities, repeats."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    x = bits.view(np.float32)
    special = np.array([0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, 1.0, 1.0, -1.0], dtype=np.float32)
    return torch.from_numpy(np.concatenate([x[~np.isnan(x)], special]))


@pytest.mark.parametrize("count", [0, 1, 1000, 100_000])
def test_radix_sort_sorts(count: int) -> None:
    x = values(count)
    before = x.clone()
    ours = cpu_sort.radix_sort(x)
    assert np.array_equal(ours.numpy(), np.sort(x.numpy()))
    assert torch.equal(x, before)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_way_gives_the_same_values(
    at_once: bool, radix: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_sort, "WORTH_ASKING", 1)
    monkeypatch.setattr(cpu_sort, "WORTH_A_THREAD", 1 if at_once else 10**9)
    monkeypatch.setattr(cpu_sort, "_radix_beats_numpy", lambda: radix)
    x, y = values(5000).to(dtype)[::2], values(3000).to(dtype)
    before = x.clone()
    first, second = cpu_sort.sort_pair(x, y)
    assert np.array_equal(first.numpy(), np.sort(x.numpy()))
    assert np.array_equal(second.numpy(), np.sort(y.numpy()))
    assert torch.equal(x, before)


def test_ctrl_c_while_the_thread_starts_leaves_it_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it may be in torch when Python ends, and the process with "terminate called" and an exit code of -6."""
    sorted_in: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu_sort, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(cpu_sort, "numpy_sort", lambda x: sorted_in.append(threading.current_thread()))
    cpu_sort.sort_pair(values(10), values(10))
    assert len(set(sorted_in)) == 2
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    sorted_in.clear()
    with pytest.raises(KeyboardInterrupt):
        cpu_sort.sort_pair(values(10), values(10))
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(timeout=10)
    assert sorted_in == []


@pytest.mark.parametrize(("numpy_seconds", "radix"), [(2.0, True), (1.5, False)])
def test_the_trial_takes_the_faster_one(numpy_seconds: float, radix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The radix sort takes a second; beside another sort it would take 1.7."""
    clock = iter((0.0, 1.0, 1.0 + numpy_seconds))
    monkeypatch.setattr("assay.metrics.cpu_sort.time.perf_counter", lambda: next(clock))
    assert cpu_sort._radix_beats_numpy.__wrapped__() is radix


@pytest.mark.parametrize("sort", [cpu_sort.numpy_sort, cpu_sort.radix_sort])
def test_a_tensor_that_is_negated_later(sort: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As the imaginary part of a conjugate is."""
    x = torch.complex(torch.zeros(100), torch.randn(100)).conj().imag
    assert x.is_neg()
    assert torch.equal(sort(x), x.resolve_neg().sort().values)
