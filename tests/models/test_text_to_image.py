"""The diffusion transformer: its formulas, its beginning, and that it learns what captions say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from assay.models.flow import flow_loss, sample
from assay.models.text_to_image import TextToImage, TextToImageConfig, text_to_image_sizes
from tests.models.tiny import IMAGES, images_inputs, images_model, sdpa


def attended(b: dict[str, Tensor], name: str, x: Tensor, context: Tensor) -> Tensor:
    """Head by head, with the norms of queries and keys."""
    k_weight, v_weight = b[f"{name}.kv.weight"].chunk(2)
    heads = []
    for rows in range(0, 32, 16):
        q, k, v = (
            linear(of, weight[rows : rows + 16])
            for of, weight in ((x, b[f"{name}.q.weight"]), (context, k_weight), (context, v_weight))
        )
        q, k = (rms_norm(t, (16,), b[f"{name}.{n}_norm.weight"], 1e-6) for n, t in (("q", q), ("k", k)))
        heads.append(scaled_dot_product_attention(q, k, v))
    return linear(torch.cat(heads, -1), b[f"{name}.out.weight"])


def test_a_block_is_its_formula() -> None:
    block = images_model().double().blocks[0]
    b = block.state_dict()
    generator = torch.Generator().manual_seed(0)
    x, words, time = (torch.randn(2, n, 32, generator=generator, dtype=torch.float64) for n in (16, 3, 9))

    def mlp(seen: Tensor) -> Tensor:
        gate, up = b["mlp.gate_up.weight"].chunk(2)
        return linear(silu(linear(seen, gate)) * linear(seen, up), b["mlp.down.weight"])

    expected = x
    layers = (lambda s: attended(b, "self_attention", s, s), lambda s: attended(b, "cross_attention", s, words), mlp)
    for i, layer in enumerate(layers):
        shift, scale, gate = (time[:, [3 * i + j]] + b["offsets"][3 * i + j] for j in range(3))
        expected = expected + gate * layer(rms_norm(expected, (32,), None, 1e-6) * (1 + scale) + shift)
    torch.testing.assert_close(block(x, words, time), expected, atol=1e-11, rtol=1e-11)


def test_at_first_blocks_pass_on_and_the_velocity_is_0() -> None:
    model = TextToImage(IMAGES, sdpa)
    streams: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: streams.extend((inputs[0], out)))
    assert not model(*images_inputs()).any()
    assert len(streams) == 4
    assert streams[0].any()
    assert all(stream.equal(streams[0]) for stream in streams)


def test_what_the_attention_is_given() -> None:
    calls = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        calls.append((q.shape, k.shape, v.shape, causal))
        return sdpa(q, k, v, causal=causal)

    images_model(attention)(*images_inputs())
    own, words = (2, 2, 16, 16), (2, 2, 3, 16)
    assert calls == [(own, own, own, False), (own, words, words, False)] * 2


def test_everything_given_matters() -> None:
    model = images_model()
    noisy, time, caption = images_inputs()
    expected = model(noisy, time, caption)
    moved = (noisy.roll(2, dims=3), time, caption), (noisy, 1 - time, caption), (noisy, time, caption.flip(1))
    for inputs in (*moved, (noisy, time, torch.zeros_like(caption))):
        assert (model(*inputs) - expected).abs().max() > 0.01
    shifted = model(noisy.roll(2, dims=3), time, caption).roll(-2, dims=3)
    assert (shifted - expected).abs().max() > 0.01, "the places of patches are not seen"
    torch.testing.assert_close(model(noisy[1:], time[1:], caption[1:]), expected[1:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    inputs = images_inputs()
    expected = images_model()(*inputs).detach()
    model = images_model().to(dtype)
    found = model(*inputs)
    assert found.dtype == dtype
    flow_loss(model, inputs[0], inputs[2], torch.ones_like(inputs[0]), inputs[1]).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    error = (found.double() - expected).square().mean().sqrt() / expected.double().std()
    assert error < 8 * max(torch.finfo(dtype).eps, 1e-6)  # a handful of roundings on the way


def test_autocast_keeps_the_stream_in_fp32() -> None:
    model = images_model()
    streams: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: streams.extend((inputs[0], out)))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(*images_inputs()).dtype == torch.bfloat16
    assert [stream.dtype for stream in streams] == [torch.float32] * 4


def test_compiled_as_one_graph() -> None:
    model = images_model()
    noisy, time, caption = images_inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    noise = torch.ones_like(noisy)
    expected, found = (flow_loss(m, noisy, caption, noise, time) for m in (model, compiled))
    torch.testing.assert_close(found, expected)
    weights = list(model.parameters())
    for a, b in zip(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(a, b)


def test_it_learns_what_captions_say() -> None:
    """Word 1: the left half is bright; word 2: the right half; no word: either."""
    generator = torch.Generator().manual_seed(0)
    images = torch.full((2, 3, 8, 8), -0.8)
    images[0, :, :, :4] = images[1, :, :, 4:] = 0.8
    words = torch.tensor([[1, 0, 0], [2, 0, 0]])
    model = TextToImage(IMAGES, sdpa)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(250):
        which = torch.arange(32) % 2
        kept = torch.rand(32, 1, generator=generator) > 0.1
        noise, time = torch.randn(32, 3, 8, 8, generator=generator), torch.rand(32, generator=generator)
        optimizer.zero_grad()
        loss = flow_loss(model, images[which], words[which] * kept, noise, time)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1.64, rel=0.1)  # a velocity of 0: 1 of the noise and 0.8² of the images
    assert sum(losses[-10:]) / 10 < 0.3
    noise = torch.randn(1, 3, 8, 8, generator=generator).expand(2, 3, 8, 8)
    for guidance in (1.0, 2.0):
        drawn = sample(model, words, noise, 16, guidance)
        assert float((drawn - images).abs().mean()) < 0.3
        assert float((drawn - images.flip(0)).abs().mean()) > 1.2


@pytest.mark.parametrize("name", text_to_image_sizes)
def test_sizes(name: str) -> None:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in TextToImage(text_to_image_sizes[name], sdpa).parameters())
    assert count == pytest.approx(float(name.replace("k", "e3").replace("m", "e6")), rel=0.15)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"image must be a multiple of patch \(5\), got 32. 30 or 35 would do"):
        TextToImageConfig(patch=5)
    with pytest.raises(ValueError, match=r"width must be a multiple of heads \(3\), got 128"):
        TextToImageConfig(heads=3)
    with pytest.raises(ValueError, match=r"two axes \(4\), got 6. 4 or 8 would do"):
        TextToImageConfig(width=6, heads=2)
    with pytest.raises(ValueError, match=r"words must be a whole number of at least 1, got 2\.5"):
        TextToImageConfig(words=2.5)  # type: ignore[arg-type]
    model = images_model()
    noisy, time, caption = images_inputs()
    for inputs in ((noisy[:, :, 1:], time, caption), (noisy, time[:1], caption), (noisy, time, caption[:, :2])):
        with pytest.raises(
            ValueError, match=r"Images must be \(batch, 3, 8, 8\), times \(batch,\) and captions \(batch, 3"
        ):
            model(*inputs)
