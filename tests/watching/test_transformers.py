"""Real transformers models, small and random, watched: every layer is found, whichever attention it uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from assay.watching.watch import watch

SIZE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "gemma2": lambda: transformers.Gemma2Config(**SIZE, sliding_window=8, attn_logit_softcapping=5.0),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZE, sliding_window=8, num_local_experts=2, num_experts_per_tok=1, layer_types=None
    ),
}
SDPA = ("llama", "gpt2")
"""The others need softcap or sinks, which torch's SDPA does not have."""


def model_of(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    found: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return found.to(dtype).eval()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "how"), [*((name, "eager") for name in CONFIGS), *((name, "sdpa") for name in SDPA)])
def test_every_layer_is_found_and_its_bits_stay(name: str, how: str, padded: bool) -> None:
    model = model_of(name, how)
    tokens = torch.arange(2 * 20).view(2, 20) % 64
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :5] = 0
    with torch.no_grad():
        alone = model(input_ids=tokens, attention_mask=mask).logits
        with watch(model) as w:
            watched = model(input_ids=tokens, attention_mask=mask).logits
    assert torch.equal(watched, alone)
    assert w.calls == 2
    assert not w.skipped
    layers = [row["layer"] for row in w.rows if row["head"] is None]
    assert [layer.split(".")[2] for layer in layers] == ["0", "1"]
    assert {row["implementation"] for row in w.rows} == {how}
    assert not any(row["over"] for row in w.rows), w.summary()


def test_in_training_and_generation() -> None:
    model = model_of("llama", "sdpa").train()
    tokens = torch.arange(2 * 20).view(2, 20) % 64
    with watch(model) as w:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert {row["tensor"] for row in w.rows} == {"output", "dq", "dk", "dv"}
    model.eval()
    ids: Any = model.generate(tokens, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
    with watch(model) as w:
        again: Any = model.generate(tokens, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
    assert torch.equal(ids, again)
    assert [(row["step"], row["queries"], row["keys"]) for row in w.rows if row["head"] is None] == [
        (0, 20, 20), (0, 20, 20), (1, 1, 21), (1, 1, 21), (2, 1, 22), (2, 1, 22),
    ]  # fmt: skip
    assert not any(row["over"] for row in w.rows)


def test_with_its_gradient_checkpointing() -> None:
    model: Any = model_of("llama", "sdpa").train()
    tokens = torch.arange(2 * 20).view(2, 20) % 64

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    model.gradient_checkpointing_enable()
    alone = gradients()
    with watch(model) as w:
        watched = gradients()
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
    whole = [(row["layer"], row["tensor"]) for row in w.rows if row["head"] is None]
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        assert whole.count((name, "output")) == 2  # forward, and again in backward
        assert all(whole.count((name, tensor)) == 1 for tensor in ("dq", "dk", "dv"))
