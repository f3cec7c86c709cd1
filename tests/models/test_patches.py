"""Patches, against torch's unfold and convolution."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv2d, linear, unfold

from assay.models.patches import from_patches, to_patches


@pytest.mark.parametrize(("channels", "size", "patch"), [(3, 8, 2), (1, 6, 3), (4, 5, 5), (3, 4, 1)])
def test_patches(channels: int, size: int, patch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, channels, size, size, generator=generator)
    patches = to_patches(images, patch)
    assert patches.equal(unfold(images, patch, stride=patch).mT)
    assert from_patches(patches, patch, channels).equal(images)
    kernel = torch.randn(7, channels, patch, patch, generator=generator)
    torch.testing.assert_close(linear(patches, kernel.flatten(1)), conv2d(images, kernel, stride=patch).flatten(2).mT)
