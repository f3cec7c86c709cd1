"""Attention registered with transformers under any name is found, and compared with what the model asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from assay.watching.watch import watch
from tests.watching.test_transformers import CONFIGS, model_of

TOKENS = torch.arange(2 * 20).view(2, 20) % 64
MASK = torch.ones_like(TOKENS)
MASK[0, :5] = 0


def mine(
    m: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, *, scaling: float, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Plain attention as a user writes it, by names of their own."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * scaling
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if hidden is None and q.shape[2] > 1:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    if hidden is not None:
        s = s.masked_fill(~hidden, -torch.inf) if hidden.dtype == torch.bool else s + hidden
    if s_aux is not None:
        s = torch.cat((s, s_aux.view(1, -1, 1, 1).expand(*s.shape[:3], 1).to(s.dtype)), -1)
    p = s.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    return (p @ v).transpose(1, 2).contiguous(), None


def coarse(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """With its result in too few bits."""
    return mine(*args, **kwargs)[0].bfloat16().float(), None


def flat(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """With its heads side by side, which models do not mind."""
    return mine(*args, **kwargs)[0].flatten(2), None


def padded(
    module: Any, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Like flash-attn: given which tokens there are, it leaves the others out."""
    out = torch.zeros_like(q).transpose(1, 2)
    for each in range(q.shape[0]):
        own = slice(None) if tokens is None else tokens[each].bool()
        one, two, three = (x[each, :, own] for x in (q, k, v))
        found = F.scaled_dot_product_attention(one, two, three, is_causal=True, scale=scaling, enable_gqa=True)
        out[each, own] = found.transpose(0, 1)
    return out, None


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers a function, with the masks of another, for the time of a test."""
    names: list[str] = []

    def registering(name: str, function: Any, masks: str | None) -> None:
        names.append(name)
        AttentionInterface.register(name, function)
        if masks is not None:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks])

    yield registering
    for name in names:
        assert ALL_ATTENTION_FUNCTIONS[name] in (mine, coarse, flat, padded)  # nothing of ours stayed
        del AttentionInterface._global_mapping[name]
        AttentionMaskInterface._global_mapping.pop(name, None)


@pytest.mark.parametrize("masks", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_is_found_and_its_bits_stay(name: str, masks: str, register: Callable[..., None]) -> None:
    register("somebody/kernel@v1:attend", mine, masks)  # as a kernel of the hub is named
    model = model_of(name, "eager")
    model.config._attn_implementation = "somebody/kernel@v1:attend"  # type: ignore[union-attr]
    with torch.no_grad():
        alone = model(input_ids=TOKENS, attention_mask=MASK).logits
        with watch(model) as w:
            watched = model(input_ids=TOKENS, attention_mask=MASK).logits
    assert torch.equal(watched, alone)
    assert w.calls == 2
    assert not w.skipped
    assert {row["implementation"] for row in w.rows} == {"somebody/kernel@v1:attend"}
    assert not any(row["over"] for row in w.rows), w.summary()


@pytest.mark.parametrize("given", [None, MASK], ids=["whole", "padded"])
def test_masks_that_only_say_which_tokens_there_are(given: Tensor | None, register: Callable[..., None]) -> None:
    register("padded", padded, "flash_attention_2")
    model = model_of("llama", "padded")
    with torch.no_grad(), watch(model) as w:
        model(input_ids=TOKENS, attention_mask=given)
    assert w.calls == 2
    assert not w.skipped
    assert not any(row["over"] for row in w.rows), w.summary()


def test_its_gradients_are_compared_and_its_faults_are_found(register: Callable[..., None]) -> None:
    register("mine", mine, None)
    register("coarse", coarse, None)
    for name in ("mine", "coarse"):
        model = model_of("llama", name).train()

        def gradients(model: Any = model) -> list[Tensor]:
            model.zero_grad()
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

        alone = gradients()
        with watch(model) as w:
            watched = gradients()
        assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
        assert {row["tensor"] for row in w.rows} == {"output", "dq", "dk", "dv"}
        assert (w.first_over is not None) == (name == "coarse"), w.summary()


def test_an_attention_that_forgets_the_window_is_over_budget(register: Callable[..., None]) -> None:
    """Without a mask of its own, it is the function that must keep to the window of gemma2's first layer."""
    register("mine", mine, None)
    model = model_of("gemma2", "mine")
    with torch.no_grad(), watch(model) as w:
        model(input_ids=TOKENS)
    whole = {row["layer"].split(".")[2]: row["over"] for row in w.rows if row["head"] is None}
    assert whole == {"0": True, "1": False}


def test_what_cannot_be_told_is_left_alone_and_named(register: Callable[..., None]) -> None:
    register("mine", mine, None)
    register("flat", flat, None)
    model: Any = model_of("llama", "mine")
    flattened = model_of("llama", "flat")
    with torch.no_grad():
        with watch(flattened) as w:
            flattened(input_ids=TOKENS)
        assert w.skipped == {"an output of an unexpected shape": 2}
        cache = model(input_ids=TOKENS[:1, :10], use_cache=True).past_key_values
        with watch(model) as w:
            model(input_ids=TOKENS[:1, 10:15], past_key_values=cache)
    [(reason, count)] = w.skipped.items()
    assert count == 2
    assert "functions mean different things by causal" in reason


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore::DeprecationWarning")
def test_flex_attention_with_its_own_kind_of_mask() -> None:
    model = model_of("gemma2", "flex_attention")
    says = "flex_attention, as transformers calls it, is compiled"
    with torch.no_grad(), pytest.warns(UserWarning, match=says), watch(model) as w:
        model(input_ids=TOKENS, attention_mask=MASK)
    assert w.calls == 2
    assert not w.skipped
    assert {row["implementation"] for row in w.rows} == {"flex_attention"}
    assert not any(row["over"] for row in w.rows), w.summary()
