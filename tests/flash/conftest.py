"""What several tests of `flash` are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def asked() -> Iterator[Any]:
    """What Triton is asked to launch by calls on CPU tensors: see `fake_launches`."""
    from tests.flash.fake_launches import asking  # Triton: not there on every machine

    with asking() as found:
        yield found
