"""Initial weights depend on the seed alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from assay.models.arithmetic import Arithmetic, Attention
from assay.models.gpt import Gpt, gpt_sizes
from assay.models.text_to_image import TextToImage
from assay.models.weights import Weights
from tests.models.tiny import IMAGES, TOKENS, sdpa

Build = Callable[..., nn.Module]


class Other(Arithmetic):
    pass


def other_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return v


def build_images(attention: Attention = sdpa, arithmetic: Arithmetic | None = None, seed: int = 0) -> nn.Module:
    return TextToImage(IMAGES, attention, arithmetic or Arithmetic(), seed)


def build_gpt(attention: Attention = sdpa, arithmetic: Arithmetic | None = None, seed: int = 0) -> nn.Module:
    return Gpt(TOKENS, attention, arithmetic or Arithmetic(), seed)


def same(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(x[name].equal(y[name]) for name in x)


@pytest.mark.parametrize("build", [build_images, build_gpt])
def test_only_the_seed_matters(build: Build) -> None:
    torch.manual_seed(1)
    expected = build()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert same(build(), expected)
    torch.manual_seed(1)
    assert torch.get_rng_state().equal(state), "torch's own generator was used"
    assert same(build(attention=other_attention, arithmetic=Other()), expected)
    with torch.device("cpu"):
        assert same(build(), expected)
    assert not same(build(seed=1), expected)
    assert all(weight.dtype == torch.float32 for weight in expected.parameters())


@pytest.mark.parametrize("build", [build_images, build_gpt])
def test_other_defaults_of_torch(build: Build) -> None:
    expected = build()
    torch.set_default_dtype(torch.float64)
    try:
        assert same(build(), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert {weight.device.type for weight in build().parameters()} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("build", [build_images, build_gpt])
def test_a_gpu_changes_nothing(build: Build) -> None:
    with torch.device("cuda"):
        there = build()
    assert {weight.device.type for weight in there.parameters()} == {"cuda"}
    assert same(there.cpu(), build())


def test_spread() -> None:
    drawn = Weights(0).normal(400, 500, std=0.3)
    assert float(drawn.detach().std()) == pytest.approx(0.3, rel=0.01)
    assert float(drawn.detach().mean()) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "0"])
def test_seeds_that_are_none(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be a whole number"):
        build_gpt(seed=seed)


def test_how_layers_begin() -> None:
    """Products keep the size of what they get; the 2 · depth that add to a Gpt's stream are smaller by √(2 · depth)."""
    for name, weight in Gpt(gpt_sizes["1m"], sdpa).state_dict().items():
        expected = weight.shape[-1] ** -0.5
        if name == "embedding.weight":
            expected = 0.02
        elif name.endswith(("out.weight", "down.weight")):
            expected /= 10**0.5
        if name.endswith("norm.weight"):
            assert (weight == 1).all(), name
        else:
            assert float(weight.std()) == pytest.approx(expected, rel=0.03), name
    zeros = {name for name, weight in build_images().state_dict().items() if not weight.any()}
    gates = {f"{name}.{part}" for name in ("adaptive", "last_adaptive", "last") for part in ("weight", "bias")}
    assert zeros == gates | {"patches.bias", "time_in.bias", "time_out.bias", "blocks.0.offsets", "blocks.1.offsets"}
