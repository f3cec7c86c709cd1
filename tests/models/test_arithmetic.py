"""The named places: what is computed there, and that a model computes nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from assay.models.arithmetic import PLAIN, Arithmetic, Attention, Place
from tests.models.tiny import images_inputs, images_model, tokens_inputs, tokens_model

NAMED = ("linear", "rms_norm", "layer_norm", "embedding", "matmul", "einsum", "bmm", "mm", "softmax", "conv2d", "addmm")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_norm_is_the_formula() -> None:
    x, weight = numbers(4, 7), numbers(7, seed=1)
    n = x.numpy()
    expected = n / np.sqrt((n**2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(PLAIN.norm(x, None, eps=1e-3).numpy(), expected, rtol=1e-13)
    np.testing.assert_allclose(PLAIN.norm(x, weight, eps=1e-3).numpy(), expected * weight.numpy(), rtol=1e-13)


def test_norm_promotes_before_it_computes() -> None:
    low, weight = numbers(4, 64).bfloat16(), numbers(64, seed=1).float()
    assert PLAIN.norm(low, weight).equal(PLAIN.norm(low.float(), weight))
    assert PLAIN.norm(low, weight.bfloat16()).dtype == torch.bfloat16


def test_linear_embedding_residual() -> None:
    x, weight, bias = numbers(2, 5, 4), numbers(3, 4, seed=1), numbers(3, seed=2)
    expected = x.numpy() @ weight.numpy().T
    for place in ("matmul", "last_layer"):
        np.testing.assert_allclose(PLAIN.linear(x, weight, bias, place).numpy(), expected + bias.numpy(), rtol=1e-13)
    np.testing.assert_allclose(PLAIN.linear(x, weight).numpy(), expected, rtol=1e-13)
    assert PLAIN.embedding(torch.tensor([[2, 0]]), weight).equal(weight[[2, 0]][None])
    assert PLAIN.residual(x.float(), x.float().bfloat16()).dtype == torch.float32


class Noted(Arithmetic):
    """Notes the places that are passed, and is open only inside one."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.inside = False

    @contextmanager
    def at(self, place: str) -> Any:
        self.places.append(place)
        self.inside = True
        yield
        self.inside = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, place: Place = "matmul") -> Tensor:
        with self.at(place):
            return super().linear(x, weight, bias, place)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
        with self.at("norm"):
            return super().norm(x, weight, eps)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        with self.at("embedding"):
            return super().embedding(ids, table)

    def residual(self, x: Tensor, y: Tensor) -> Tensor:
        with self.at("residual"):
            return super().residual(x, y)

    def attention(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with self.at("attention"):
            return super().attention(attention, q, k, v, causal)


class Guard(TorchFunctionMode):
    """Refuses what has a named place when it is computed elsewhere."""

    def __init__(self, arithmetic: Noted) -> None:
        super().__init__()
        self.arithmetic = arithmetic

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = (resolve_name(func) or "").rsplit(".", 1)[-1].strip("_")
        assert self.arithmetic.inside or name not in NAMED, f"{name} is computed outside of the arithmetic"
        return func(*args, **(kwargs or {}))


def test_the_guard_sees() -> None:
    with pytest.raises(AssertionError, match="matmul is computed outside"), Guard(Noted()):
        _ = torch.ones(2, 2) @ torch.ones(2, 2)


def test_everything_goes_through_the_arithmetic() -> None:
    noted = Noted()
    model = images_model(arithmetic=noted)
    with Guard(noted):
        model(*images_inputs())
    counts = {place: noted.places.count(place) for place in set(noted.places)}
    # A block: 3 + 3 + 2 products, 3 norms and 4 of queries and keys, 3 additions, 2 attentions.
    # Around them: patches, 2 of the time, 2 adaptive; a norm of the words and the last one; 2 positions.
    assert counts == {"matmul": 21, "last_layer": 1, "norm": 16, "embedding": 1, "residual": 8, "attention": 4}


def test_gpt_too() -> None:
    noted = Noted()
    model = tokens_model(arithmetic=noted)
    with Guard(noted):
        model(tokens_inputs())
    counts = {place: noted.places.count(place) for place in set(noted.places)}
    assert counts == {"matmul": 10, "last_layer": 1, "norm": 5, "embedding": 1, "residual": 4, "attention": 2}
