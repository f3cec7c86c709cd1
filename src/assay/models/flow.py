"""Rectified flow: straight lines from images (time 0) to noise (time 1), and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from assay.models.checks import check_counts

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`velocity(noisy, time, caption)`: a TextToImage, compiled or not."""


def flow_loss(model: Velocity, images: Tensor, caption: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """The mean squared error of the velocity, noise − images, at (1 − time) · images + time · noise; at least in FP32.

    Images (B, C, S, S) from −1 to 1, captions (B, L), noise like the images, times (B,) from 0 to 1. For guidance some
    of the captions in training must be empty (all 0).
    """
    dtype = torch.promote_types(images.dtype, torch.float32)
    images, noise, t = images.to(dtype), noise.to(dtype), time.to(dtype)[:, None, None, None]
    velocity = model((1 - t) * images + t * noise, time, caption)
    wide = torch.promote_types(velocity.dtype, dtype)
    return (velocity.to(wide) - (noise - images).to(wide)).square().mean()


@torch.no_grad()
def sample(model: Velocity, caption: Tensor, noise: Tensor, steps: int, guidance: float) -> Tensor:
    """Images for the captions, from noise at time 1 in equal Euler steps to time 0.

    The velocity is empty + guidance · (captioned − empty), that of the empty caption and that of the given one: 1 takes
    the caption as it is, more overstates it, 0 forgets it.
    """
    check_counts(steps=steps)
    if not math.isfinite(guidance):
        raise ValueError(f"guidance must be a finite number, got {guidance!r}. 1 is none.")
    x = noise
    for step in range(steps):
        time = torch.full((len(x),), 1 - step / steps, dtype=torch.float32, device=x.device)
        x = x - _guided(model, x, time, caption, guidance).to(x.dtype) / steps
    return x


def _guided(model: Velocity, x: Tensor, time: Tensor, caption: Tensor, guidance: float) -> Tensor:
    if guidance == 1:
        return model(x, time, caption)
    both = torch.cat((caption, torch.zeros_like(caption)))
    captioned, empty = model(x.repeat(2, 1, 1, 1), time.repeat(2), both).chunk(2)
    return empty + guidance * (captioned - empty)
