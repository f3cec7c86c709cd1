"""What a GPU has."""

from __future__ import annotations

from functools import cache

import torch


@cache
def processors(index: int) -> int:
    """Its multiprocessors."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
