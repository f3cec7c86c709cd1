"""What the tests of the callbacks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

_ORIGINAL = (F.scaled_dot_product_attention,)  # not by a name, where a watch would find and replace it


@pytest.fixture
def nothing_is_left_patched() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for a second one
    yield
    torch.set_num_threads(threads)
    assert F.scaled_dot_product_attention is _ORIGINAL[0]
    assert not torch.nn.modules.module._global_forward_hooks
