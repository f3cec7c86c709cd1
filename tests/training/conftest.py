"""Sizes small enough for a test, on one thread: several would wait for each other, and for whatever else runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from assay.models.gpt import gpt_sizes
from assay.models.text_to_image import text_to_image_sizes
from tests.training import small


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(text_to_image_sizes, "dot", small.IMAGES)
    monkeypatch.setitem(gpt_sizes, "dot", small.TOKENS)
