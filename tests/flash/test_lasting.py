"""Tensors that outlive a call are made where no compiler counts what is allocated."""

from __future__ import annotations

import threading

import pytest
import torch

from assay.flash.lasting import lasting


def test_is_made_in_a_thread_of_its_own() -> None:
    threads: list[threading.Thread] = []

    def make() -> torch.Tensor:
        threads.append(threading.current_thread())
        return torch.arange(3)

    with torch.inference_mode():
        made = lasting(make)
    assert made.tolist() == [0, 1, 2]
    assert not made.is_inference()
    assert threads[0] is not threading.current_thread()


def test_errors_come_through() -> None:
    def make() -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("full")

    with pytest.raises(torch.cuda.OutOfMemoryError, match="full"):
        lasting(make)
