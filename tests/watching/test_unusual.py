"""Calls that are not like others: compared for what they are, or left alone for a reason that is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from assay.watching.watch import watch
from tests.watching.models import inputs, stack
from tests.watching.test_transformers import model_of


class Attention(nn.Module):
    """Of tensors that it makes itself."""

    def __init__(self, make: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.make(x))


def heads(x: Tensor) -> Tensor:
    y: Tensor = x.unflatten(-1, (4, -1))
    return y.transpose(1, 2)


UNUSUAL: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "one head of keys": lambda x: (heads(x), heads(x)[:, :1], heads(x)[:, 1:2]),
    "frozen keys": lambda x: (heads(x), heads(x).detach(), heads(x)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_all_gradients_are_compared(name: str) -> None:
    model, x = Attention(UNUSUAL[name]), inputs(torch.float32)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        return [out, *torch.autograd.grad(out.square().sum(), leaf)]

    alone = run()
    with watch(model) as w:
        watched = run()
    for a, b in zip(watched, alone, strict=True):
        assert torch.equal(a, b)
    assert {row["tensor"] for row in w.rows} == {"output", "dq", "dk", "dv"}
    assert not w.skipped


@pytest.mark.parametrize("cached", [False, True])
def test_eager_attention_under_autocast(cached: bool) -> None:
    """q and k come in FP32, from the rotary embedding, and v in bf16 or, out of a cache, in FP32."""
    model: Any = model_of("llama", "eager").train()
    model.config.use_cache = cached
    tokens = torch.arange(2 * 20).view(2, 20) % 64
    with watch(model) as w:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    assert {row["format"] for row in w.rows} == {"bf16"}
    assert not any(row["over"] for row in w.rows), w.summary()


def test_a_bias_of_positions() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    model = transformers.T5Model._from_config(config, attn_implementation="eager").eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad(), watch(model) as w:
        model(input_ids=tokens, decoder_input_ids=tokens)
    assert w.calls == 6  # encoder, decoder, and the one upon the other, in two layers
    assert not any(row["over"] for row in w.rows), w.summary()


@pytest.mark.parametrize(("every", "expected"), [(0.7, 14), (0.4, 8), (0.25, 5), (3, 7)])
def test_a_share_is_what_it_says(every: float, expected: int) -> None:
    model, x = Attention(UNUSUAL["frozen keys"]), inputs(torch.float32)
    with watch(model, every=every, golden=False) as w, torch.no_grad():
        for _ in range(20):
            model(x)
    assert w.calls == expected


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_cannot_be_compared_goes_on_and_is_named() -> None:
    model, x = stack(torch.float32), inputs(torch.float32)
    model(x)
    with watch(model) as w, torch.no_grad():
        model(x)
        torch.func.vmap(model)(x[:, None])
        model(x[:, :0])
    assert w.skipped == {"a transform of torch.func": 3, "an empty tensor": 3}
    with watch(model.double()) as w:
        model(x.double())
    assert w.skipped == {"FP64: golden is no better": 3}


def test_attention_of_others_is_not_the_model_s() -> None:
    other, x = stack(torch.float32), inputs(torch.float32)
    with watch(stack(torch.float32)) as w:
        other(x)
    assert {row["layer"] for row in w.rows} == {"(outside of the model)"}
    plain = nn.Linear(32, 32)
    with pytest.raises(ValueError, match="No attention was found in Linear"), watch(plain):
        plain(other(x))


def test_weights_of_a_plain_module_are_golden_too() -> None:
    torch.manual_seed(0)
    fast, plain = nn.LayerNorm(32), nn.LayerNorm(32)
    nn.init.normal_(fast.weight)
    plain.load_state_dict(fast.state_dict())
    model = nn.Sequential(fast)
    with watch(model, also={fast: plain}) as w:
        model(inputs(torch.float32).requires_grad_()).sum().backward()
    assert {row["tensor"] for row in w.rows} == {"output", "d0"}
    assert all(0 < row["error_max"] < 1e-5 for row in w.rows)


def test_a_model_is_a_module() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got int"):
        watch(3)  # type: ignore[arg-type]


def test_an_error_in_comparing_is_not_the_model_s() -> None:
    narrow = nn.Linear(32, 32)
    fast = nn.Linear(32, 32)
    model = nn.Sequential(fast)
    with pytest.warns(UserWarning, match="The model goes on"), watch(model, also={fast: lambda x: narrow(x)}) as w:
        model(inputs(torch.float32))
    (reason,) = w.skipped
    assert "an error while it was compared (RuntimeError" in reason


def test_wrong_arguments_are_the_function_s_to_refuse() -> None:
    model = Attention(lambda x: (heads(x), heads(x), 3))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="scaled_dot_product_attention"), watch(model) as w:
        model(inputs(torch.float32))
    [(reason, count)] = w.skipped.items()
    assert (reason.split(" (")[0], count) == ("arguments that the watch does not understand", 1)
