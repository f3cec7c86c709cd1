"""Our attention in diffusers' models: small random ones in the manner of Stable Diffusion, DiT and Flux."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import assay
from assay.integrations import sdpa

diffusers = pytest.importorskip("diffusers")

from diffusers.models.attention_processor import (  # noqa: E402
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
)

from assay.integrations import diffusers_  # noqa: E402
from assay.integrations.diffusers_ import AssayAttnProcessor, use_for_diffusers  # noqa: E402

Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The work is too small to share. And diffusers logs that models were cast."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    diffusers.utils.logging.disable_default_handler()
    yield
    diffusers.utils.logging.enable_default_handler()
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unet() -> tuple[Any, Inputs]:
    """As Stable Diffusion's; the second caption is shorter."""
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=2,
    )
    return model, {
        "sample": normal(2, 4, 16, 16),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": normal(2, 7, 24, seed=1),
        "encoder_attention_mask": torch.arange(7) < torch.tensor([[7], [4]]),
    }


def dit() -> tuple[Any, Inputs]:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        out_channels=4,
        num_layers=2,
        norm_num_groups=8,
        sample_size=16,
        num_embeds_ada_norm=10,
    )
    labels = torch.tensor([1, 2])
    return model, {
        "hidden_states": normal(2, 4, 16, 16),
        "timestep": torch.tensor([3, 500]),
        "class_labels": labels,
    }


def flux() -> tuple[Any, Inputs]:
    """Its processors call diffusers' dispatcher."""
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=24,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": normal(2, 64, 4),
        "encoder_hidden_states": normal(2, 7, 24, seed=1),
        "pooled_projections": normal(2, 24, seed=2),
        "timestep": torch.tensor([0.1, 0.9]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
        "txt_ids": torch.zeros(7, 3),
    }


MODELS: dict[str, Callable[[], tuple[Any, Inputs]]] = {"unet": unet, "dit": dit, "flux": flux}
CALLS = {"unet": 8, "dit": 2, "flux": 2}
"""Attention modules, each called once."""


def made(name: str, dtype: torch.dtype = torch.float16) -> tuple[Any, Inputs]:
    """In eval: DiT drops labels in training. What is initialised to 0 would hide attention's error, or its gradient."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return model.to(dtype).eval(), cast(inputs, dtype)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def output(model: Any, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs, return_dict=False)[0]
    return out


def output_and_gradients(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    """The gradients by the names of their parameters."""
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"": out.detach()} | gradients


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that our function was called with, by its own operator rather than by ATen's kernel."""
    shapes: list[torch.Size] = []

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append(query.shape)
        return assay.scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attention)
    monkeypatch.setattr("assay.flash.cpu_plain.takes", lambda *_: False)
    return shapes


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_within_budget_and_back_bit_for_bit(name: str, dtype: torch.dtype, ours: list[torch.Size]) -> None:
    """Twice the error of the model's own attention for outputs, three times for gradients, against FP64."""
    model, inputs = made(name, dtype)
    golden = output_and_gradients(copy.deepcopy(model).double(), cast(inputs, torch.float64))
    own = output_and_gradients(model, inputs)
    assert not ours
    with use_for_diffusers(model):
        with_ours = output_and_gradients(model, inputs)
    assert len(ours) == CALLS[name]
    for key, truth in golden.items():
        error, budget = rms(with_ours[key] - truth), rms(own[key] - truth)
        rounding = torch.finfo(dtype).eps * rms(truth)  # what any gradient of this dtype may be off by
        assert error <= (3 if key else 2) * budget + rounding, key
    again = output_and_gradients(model, inputs)
    assert len(ours) == CALLS[name]
    assert all(torch.equal(again[key], own[key]) for key in own)


def test_processor_of_unets(ours: list[torch.Size]) -> None:
    model, inputs = made("unet")
    own, processors = output(model, inputs), model.attn_processors
    with use_for_diffusers(model):
        expected = output(model, inputs)
    ours.clear()
    model.set_attn_processor(AssayAttnProcessor())
    assert torch.equal(output(model, inputs), expected)
    assert len(ours) == CALLS["unet"]
    assert not torch.equal(expected, own)
    model.set_attn_processor(processors)
    assert torch.equal(output(model, inputs), own)


@pytest.mark.parametrize("name", MODELS)
def test_use_for_sdpa_is_enough(name: str, ours: list[torch.Size]) -> None:
    model, inputs = made(name)
    with use_for_diffusers(model):
        expected = output(model, inputs)
    with sdpa.use_for_sdpa():
        assert torch.equal(output(model, inputs), expected)
    assert len(ours) == 2 * CALLS[name]


def test_processors_are_the_same_objects_after(ours: list[torch.Size]) -> None:
    model, inputs = made("flux")
    processors = model.attn_processors

    def fails() -> None:
        output(model, inputs)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), use_for_diffusers(model), use_for_diffusers(model):
        fails()
    assert len(ours) == CALLS["flux"]
    after = model.attn_processors
    assert after.keys() == processors.keys()
    assert all(after[key] is processors[key] for key in after)


def test_another_processor_set_inside_stays() -> None:
    model, _ = made("unet")
    other = AttnProcessor2_0()
    with use_for_diffusers(model):
        model.set_attn_processor(other)
    assert all(processor is other for processor in model.attn_processors.values())


def test_a_whole_pipeline(ours: list[torch.Size]) -> None:
    """Two steps; the decoder's attention is torch's."""
    model, _ = made("dit", torch.float32)
    torch.manual_seed(0)
    decoder = diffusers.AutoencoderKL(block_out_channels=(16,), norm_num_groups=8, sample_size=16)
    pipe = diffusers.DiTPipeline(transformer=model, vae=decoder, scheduler=diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def picture() -> Any:
        seeded = {"generator": torch.Generator().manual_seed(0), "num_inference_steps": 2, "output_type": "np"}
        return torch.from_numpy(pipe(class_labels=[1, 2], guidance_scale=1.0, **seeded).images)

    own = picture()
    with use_for_diffusers(pipe.transformer):
        with_ours = picture()
    assert len(ours) == 2 * CALLS["dit"]
    assert (with_ours - own).abs().max() < 1e-4
    assert torch.equal(picture(), own)


def test_gradient_checkpointing(ours: list[torch.Size]) -> None:
    model, inputs = made("unet")
    model.set_attn_processor(AssayAttnProcessor())
    expected = output_and_gradients(model, inputs)
    assert len(ours) == CALLS["unet"]
    model.train().enable_gradient_checkpointing()
    again = output_and_gradients(model, inputs)
    assert len(ours) == 3 * CALLS["unet"]
    assert all(torch.equal(again[key], expected[key]) for key in expected)


@pytest.fixture
def graphs() -> Iterator[list[list[str]]]:
    """What the graphs call that were compiled with `compiled`."""
    torch._dynamo.reset()
    _GRAPHS.clear()
    yield _GRAPHS
    torch._dynamo.reset()


_GRAPHS: list[list[str]] = []


def compiled(model: nn.Module) -> Any:
    """As one graph, or an error."""

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        _GRAPHS.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    return torch.compile(model, backend=backend, fullgraph=True)


def test_compiled_model(graphs: list[list[str]]) -> None:
    model, inputs = made("flux")
    with use_for_diffusers(model):
        expected = output(model, inputs)
        assert torch.equal(output(compiled(model), inputs), expected)
    assert len(graphs) == 1
    assert graphs[0].count("assay.flash_forward.default") == CALLS["flux"]


def test_compiled_processor(graphs: list[list[str]]) -> None:
    attention: Any = Attention(16, heads=2, dim_head=8).half()
    attention.set_processor(AssayAttnProcessor())
    x = normal(2, 9, 16).half()
    assert torch.equal(compiled(attention)(x), attention(x))
    assert len(graphs) == 1
    assert "assay.flash_forward.default" in graphs[0]


def test_a_processor_with_weights_keeps_them(ours: list[torch.Size]) -> None:
    """Ours has its attributes, and what is set on ours is set on it: an IP adapter's scale is changed while it runs."""
    torch.manual_seed(0)
    processor = IPAdapterAttnProcessor2_0(hidden_size=16, cross_attention_dim=24, num_tokens=(2,))
    attention: Any = Attention(16, 24, heads=2, dim_head=8)
    attention.set_processor(processor)
    model = nn.Sequential(attention).half()
    names = set(model.state_dict())
    given = (normal(2, 9, 16).half(), (normal(2, 5, 24).half(), [normal(2, 1, 2, 24).half()]))
    own = attention(*given)
    with use_for_diffusers(model):
        assert set(model.state_dict()) == names
        out = attention(*given)
        attention.processor.scale = [0.0]
    assert len(ours) == 2  # of the text, and of the picture
    assert (out - own).abs().max() < 1e-2
    assert processor.scale == [0.0]
    assert attention.processor is processor


class Plain(AttnProcessor):
    """A kind of its own: it warns once in a process."""


def test_a_processor_that_calls_no_attention_warns_once() -> None:
    model, inputs = made("unet", torch.float32)
    model.set_attn_processor(Plain())
    expected = output(model, inputs)
    with use_for_diffusers(model):
        with pytest.warns(UserWarning, match="Plain did not call torch's attention") as heard:
            out = output(model, inputs)
        output(model, inputs)  # warnings are errors
    assert len(heard) == 1
    assert torch.equal(out, expected)


def test_models_that_are_not_for_it() -> None:
    with pytest.raises(ValueError, match=r"Linear has none.*use_for_sdpa"), use_for_diffusers(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match=r"such as pipe\.unet, got str"), use_for_diffusers("model"):  # type: ignore[arg-type]
        pass
    model, inputs = made("flux")
    model.set_attn_processor(AssayAttnProcessor())
    with pytest.raises(ValueError, match=r"got FluxAttention\. Use `with use_for_diffusers"):
        output(model, inputs)


def again() -> None:
    """Import our module once more, beside the one that is there."""
    spec = importlib.util.spec_from_file_location("again", diffusers_.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("found", ["0.35.2", "1.0.0"])
def test_other_versions(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", found)
    with pytest.raises(ValueError, match=rf"diffusers must be of the range diffusers>=0\.36,<1, got {found}"):
        again()


@pytest.mark.parametrize("found", ["0.36.0", "0.42.1", "0.43.0.dev0"])
def test_versions_that_are_supported(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", found)
    again()


def test_without_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusers>=0\.36,<1'"):
        again()
