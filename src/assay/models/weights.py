"""Initial weights: they depend on the seed and on nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Weights:
    """Makes a model's parameters one after the other, in FP32.

    They are drawn on the CPU from a generator of their own and then moved to torch's default device, so that neither
    the device nor torch's global generator nor what the model computes with changes them.
    """

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be a whole number from 0 to below 2**63, got {seed!r}.")
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def normal(self, *shape: int, std: float) -> nn.Parameter:
        """Normally distributed around 0. Nothing is drawn for the meta device, which has no values."""
        if torch.get_default_device().type == "meta":
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        return _placed(torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu").mul_(std))

    def zeros(self, *shape: int) -> nn.Parameter:
        """All 0, for what must change nothing at first."""
        return _placed(torch.zeros(shape, dtype=torch.float32, device="cpu"))

    def ones(self, *shape: int) -> nn.Parameter:
        """All 1, for a norm's weight."""
        return _placed(torch.ones(shape, dtype=torch.float32, device="cpu"))


def _placed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.to(torch.get_default_device()))
