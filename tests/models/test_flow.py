"""Rectified flow: the loss and the way back, on flows whose velocity is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from assay.models.flow import flow_loss, sample
from tests.models.tiny import images_inputs

IMAGES, TIME, CAPTION = images_inputs(4)
NOISE = torch.randn(IMAGES.shape, generator=torch.Generator().manual_seed(9))


def test_the_true_velocity_has_no_loss() -> None:
    assert flow_loss(lambda x, t, c: NOISE - IMAGES, IMAGES, CAPTION, NOISE, TIME) == 0
    loss = flow_loss(lambda x, t, c: NOISE - IMAGES + 0.5, IMAGES, CAPTION, NOISE, TIME)
    assert float(loss) == pytest.approx(0.25, rel=1e-5)


def test_what_the_model_sees() -> None:
    seen = []

    def model(x: Tensor, time: Tensor, caption: Tensor) -> Tensor:
        seen.append((x, time, caption))
        return torch.zeros_like(x)

    time = torch.tensor([0.0, 1.0, 0.25, 0.5])
    loss = flow_loss(model, IMAGES, CAPTION, NOISE, time)
    x, same_time, same_caption = seen[0]
    assert x[0].equal(IMAGES[0])
    assert x[1].equal(NOISE[1])
    torch.testing.assert_close(x[2], torch.lerp(IMAGES[2], NOISE[2], 0.25))
    assert same_time.equal(time)
    assert same_caption.equal(CAPTION)
    assert float(loss) == pytest.approx(float(torch.nn.functional.mse_loss(IMAGES, NOISE)), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_fp32(dtype: torch.dtype) -> None:
    loss = flow_loss(lambda x, t, c: x.to(dtype), IMAGES.to(dtype), CAPTION, NOISE.to(dtype), TIME)
    assert loss.dtype == torch.float32
    assert flow_loss(lambda x, t, c: x.double(), IMAGES, CAPTION, NOISE, TIME).dtype == torch.float64


def test_sampling_arrives_at_the_image() -> None:
    times = []

    def towards(x: Tensor, time: Tensor, caption: Tensor) -> Tensor:
        times.append(float(time[0]))
        return (x - IMAGES) / time[:, None, None, None]  # the way of one image: any number of steps is exact

    torch.testing.assert_close(sample(towards, CAPTION, NOISE, 4, 1.0), IMAGES, atol=1e-5, rtol=0)
    assert times == [1.0, 0.75, 0.5, 0.25]


def test_euler_is_of_first_order() -> None:
    """dx/dt = x ends at x/e; twice the steps have half the error."""
    errors = [
        float((sample(lambda x, t, c: x, CAPTION, NOISE, n, 1.0) - NOISE / math.e).abs().max()) for n in (50, 100)
    ]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.0])
def test_guidance(guidance: float) -> None:
    def model(x: Tensor, time: Tensor, caption: Tensor) -> Tensor:
        return (caption.sum(1) + 1.0)[:, None, None, None].expand_as(x)

    caption = torch.tensor([[1, 0, 0], [2, 3, 0], [0, 0, 0], [4, 0, 0]])
    moved = NOISE - sample(model, caption, NOISE, 1, guidance)
    expected = 1 + guidance * caption.sum(1)[:, None, None, None].expand_as(NOISE)
    torch.testing.assert_close(moved, expected.float(), atol=1e-5, rtol=1e-5)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        sample(lambda x, t, c: x, CAPTION, NOISE, 0, 1.0)
    with pytest.raises(ValueError, match="guidance must be a finite number, got nan"):
        sample(lambda x, t, c: x, CAPTION, NOISE, 1, math.nan)
