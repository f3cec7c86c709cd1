"""Where a loss that is no number began."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from assay.training.blame import Diverged, where_it_began


class Divide(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x / 0, "a module may give more than a tensor"


class Model(nn.Module):
    def __init__(self, middle: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(2, 2), nn.Sequential(nn.ReLU(), middle), nn.Linear(2, 2)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        found = self.middle(self.first(x))
        last: Tensor = self.last(found if isinstance(found, Tensor) else found[0])
        return last * self.scale


@pytest.mark.parametrize(
    ("model", "loss_factor", "says"),
    [
        (Model(Divide()), 1.0, "it began in middle.1"),
        (Model(nn.Identity(), math.inf), 1.0, "it began in the output"),
        (Model(nn.Identity()), math.nan, "no layer gave it: it began in the loss itself"),
    ],
)
def test_the_first_place_is_named(model: Model, loss_factor: float, says: str) -> None:
    x = torch.ones(1, 2)
    assert where_it_began(model, lambda: model(x).sum() * loss_factor) == says
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_that_are_not_finite_come_first() -> None:
    model = Model(Divide())
    with torch.no_grad():
        model.last.bias[1] = math.inf
    assert where_it_began(model, lambda: model(torch.ones(1, 2))) == "the weights last.bias were not finite already"


def test_hooks_go_when_computing_fails() -> None:
    model = Model(nn.Identity())
    with pytest.raises(RuntimeError, match="shapes"):
        where_it_began(model, lambda: model(torch.ones(1, 3)))
    assert not any(module._forward_hooks for module in model.modules())


def test_the_message_counts_steps_from_1() -> None:
    error = Diverged(4, math.inf, "it began in head")
    assert str(error) == "its loss was inf at step 5; it began in head"
    assert (error.step, error.loss, error.where) == (4, math.inf, "it began in head")
