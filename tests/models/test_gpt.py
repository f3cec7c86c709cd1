"""The decoder, against Llama's formulas written with torch's own functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, rms_norm, scaled_dot_product_attention, silu

from assay.models.gpt import Gpt, GptConfig, gpt_sizes, next_token_loss
from tests.models.test_positions import by_complex_numbers
from tests.models.tiny import TOKENS, sdpa, tokens_inputs, tokens_model


def llama(weights: dict[str, Tensor], config: GptConfig, tokens: Tensor) -> Tensor:
    """Logits in FP64: complex rotary, keys and values repeated by hand, gate and up apart."""
    w = {name: weight.double() for name, weight in weights.items()}
    width, dim = config.width, config.width // config.heads
    x = embedding(tokens, w["embedding.weight"])
    batch, length = tokens.shape
    for i in range(config.depth):
        b = {name.removeprefix(f"blocks.{i}."): weight for name, weight in w.items()}
        seen = rms_norm(x, (width,), b["attention_norm.weight"], 1e-6)
        k_weight, v_weight = b["attention.kv.weight"].chunk(2)
        q, k, v = (
            linear(seen, weight).view(batch, length, -1, dim).transpose(1, 2)
            for weight in (b["attention.q.weight"], k_weight, v_weight)
        )
        k, v = (t.repeat_interleave(config.heads // config.kv_heads, dim=1) for t in (k, v))
        mixed = scaled_dot_product_attention(by_complex_numbers(q), by_complex_numbers(k), v, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(batch, length, width), b["attention.out.weight"])
        seen = rms_norm(x, (width,), b["mlp_norm.weight"], 1e-6)
        gate, up = b["mlp.gate_up.weight"].chunk(2)
        x = x + linear(silu(linear(seen, gate)) * linear(seen, up), b["mlp.down.weight"])
    return linear(rms_norm(x, (width,), w["last_norm.weight"], 1e-6), w.get("last.weight", w["embedding.weight"]))


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_llama(tied: bool) -> None:
    config = replace(TOKENS, tied=tied)
    model, tokens = tokens_model(config=config), tokens_inputs()
    assert ("last.weight" in model.state_dict()) is not tied
    expected = llama(model.state_dict(), config, tokens)
    assert float(expected.std()) > 0.5
    # In FP64 all that is left is the FP32 of the rotary tables.
    torch.testing.assert_close(model.double()(tokens), expected, atol=1e-4, rtol=1e-4)


def test_later_tokens_are_not_seen() -> None:
    model, tokens = tokens_model(), tokens_inputs()
    other = tokens.clone()
    other[:, 10:] = (other[:, 10:] + 1) % 50
    torch.testing.assert_close(model(tokens)[:, :10], model(other)[:, :10], atol=1e-5, rtol=1e-5)
    assert (model(tokens)[:, 10:] - model(other)[:, 10:]).abs().max() > 0.1
    torch.testing.assert_close(model(tokens[:, :10]), model(tokens)[:, :10], atol=1e-5, rtol=1e-5)


def test_what_the_attention_is_given() -> None:
    calls = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        calls.append((q.shape, k.shape, v.shape, causal))
        return sdpa(q, k, v, causal=causal)

    tokens_model(attention)(tokens_inputs())
    assert calls == [((2, 4, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8), True)] * 2


def test_the_loss_is_that_of_the_next_token() -> None:
    model, tokens = tokens_model(), tokens_inputs()
    expected = cross_entropy(model(tokens)[:, :-1].double().reshape(-1, 50), tokens[:, 1:].reshape(-1))
    assert next_token_loss(model, tokens).item() == pytest.approx(expected.item(), rel=1e-5)
    untrained = next_token_loss(Gpt(TOKENS, sdpa), tokens).item()
    assert untrained == pytest.approx(torch.tensor(50.0).log().item(), abs=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    expected = tokens_model()(tokens_inputs()).detach()
    model = tokens_model().to(dtype)
    found = model(tokens_inputs())
    assert found.dtype == dtype
    next_token_loss(model, tokens_inputs()).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    error = (found.double() - expected).square().mean().sqrt() / expected.double().std()
    assert error < 8 * max(torch.finfo(dtype).eps, 1e-6)  # a handful of roundings on the way


def test_compiled_as_one_graph() -> None:
    model, tokens = tokens_model(), tokens_inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, found = next_token_loss(model, tokens), next_token_loss(compiled, tokens)
    torch.testing.assert_close(found, expected)
    weights = list(model.parameters())
    for a, b in zip(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(a, b)


def test_it_learns_a_text_by_heart() -> None:
    text = torch.tensor(list(b"It is not gold all that glitters"))[None]
    model = Gpt(GptConfig(context=32, width=64, depth=2, heads=4, kv_heads=2), sdpa)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = next_token_loss(model, text).item()
    for _ in range(100):
        optimizer.zero_grad()
        next_token_loss(model, text).backward()
        optimizer.step()
    assert first > 5
    assert next_token_loss(model, text) < 0.05
    tokens = text[:, :5]  # "It is": a blank, then "not"; alone "t" and " " have several followers
    for _ in range(27):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert tokens.equal(text)


@pytest.mark.parametrize("name", gpt_sizes)
def test_sizes(name: str) -> None:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in Gpt(gpt_sizes[name], sdpa).parameters())
    assert count == pytest.approx(float(name.replace("k", "e3").replace("m", "e6")), rel=0.15)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"heads must be a multiple of kv_heads \(3\), got 4. 3 or 6 would do"):
        GptConfig(kv_heads=3)
    with pytest.raises(
        ValueError, match=r"width must be a multiple of two \(rotary pairs\) for each head \(8\), got 4"
    ):
        GptConfig(width=4, heads=4)
    with pytest.raises(ValueError, match="depth must be a whole number of at least 1, got 0"):
        GptConfig(depth=0)
    with pytest.raises(ValueError, match="tied must be True or False, got 1"):
        GptConfig(tied=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"at most 24\), got \(1, 25\)"):
        tokens_model()(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"at least 2\), to have a next one; got \(1, 1\)"):
        next_token_loss(tokens_model(), torch.zeros(1, 1, dtype=torch.int64))
