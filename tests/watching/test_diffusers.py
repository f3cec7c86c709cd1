"""diffusers' models, small and random, watched: every processor's attention is found, whichever it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.watching.watch import watch

diffusers = pytest.importorskip("diffusers")

from diffusers.models.attention_processor import (  # noqa: E402
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    SlicedAttnProcessor,
)

from assay.integrations.diffusers_ import AssayAttnProcessor, use_for_diffusers  # noqa: E402
from tests.integrations.test_diffusers import CALLS, MODELS, made, output, output_and_gradients  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The work is too small to share. And diffusers logs that models were cast."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    diffusers.utils.logging.disable_default_handler()
    yield
    diffusers.utils.logging.enable_default_handler()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_found_in_training_and_its_bits_stay(name: str, dtype: torch.dtype) -> None:
    model, given = made(name, dtype)
    alone = output_and_gradients(model, given)
    with watch(model) as w:
        watched = output_and_gradients(model, given)
    assert all(torch.equal(watched[key], alone[key]) for key in alone)
    assert w.calls == CALLS[name]
    assert not w.skipped
    whole = [row for row in w.rows if row["head"] is None]
    named = dict(model.named_modules())
    layers = [row["layer"] for row in whole if row["tensor"] == "output"]
    assert len(set(layers)) == CALLS[name]
    assert all(hasattr(named[layer], "processor") for layer in layers)
    assert {row["tensor"] for row in whole} == {"output", "dq", "dk", "dv"}
    assert not any(row["over"] for row in whole if row["tensor"] == "output"), w.summary()
    assert all(row["error_relative"] < 0.1 for row in whole)


@pytest.mark.parametrize("name", MODELS)
def test_with_our_attention_in_it(name: str) -> None:
    model, given = made(name, torch.float32)
    with use_for_diffusers(model):
        alone = output(model, given)
        with watch(model) as w:
            assert torch.equal(output(model, given), alone)
    assert w.calls == CALLS[name]
    assert not any(row["over"] for row in w.rows if row["head"] is None)


def test_our_processor() -> None:
    model, given = made("unet", torch.float32)
    model.set_attn_processor(AssayAttnProcessor())
    with watch(model) as w:
        output(model, given)
    assert w.calls == CALLS["unet"]
    masked = [row["layer"] for row in w.rows if row["head"] is None and row["masked"]]
    assert masked == [row["layer"] for row in w.rows if row["head"] is None and row["layer"].endswith("attn2")]


class Forgetful:
    """A user's, that changes what attention sees after the softmax: in place, or by another tensor."""

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, **_: Any) -> Tensor:
        x = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            attn.head_to_batch_dim(f(y)) for f, y in ((attn.to_q, hidden_states), (attn.to_k, x), (attn.to_v, x))
        )
        p = attn.get_attention_scores(q, k)
        p = p.mul_(0.5) if self.in_place else p * 0.5
        out: Tensor = attn.to_out[0](attn.batch_to_head_dim(torch.bmm(p, v)))
        return out


PROCESSORS: dict[str, tuple[Callable[[], Any], int]] = {
    "plain": (AttnProcessor, 1),
    "sliced": (lambda: SlicedAttnProcessor(1), 4),  # two heads of two pictures, one at a time
    "sliced unevenly": (lambda: SlicedAttnProcessor(3), 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_without_sdpa(name: str, dtype: torch.dtype) -> None:
    model, given = made("unet", dtype)
    make, slices = PROCESSORS[name]
    model.set_attn_processor(make())
    bmm, scores = torch.bmm, Attention.get_attention_scores
    alone = output_and_gradients(model, given)
    with watch(model) as w:
        watched = output_and_gradients(model, given)
    assert (torch.bmm, Attention.get_attention_scores) == (bmm, scores)
    assert all(torch.equal(watched[key], alone[key]) for key in alone)
    assert w.calls == slices * CALLS["unet"]
    assert not w.skipped
    whole = [row for row in w.rows if row["head"] is None]
    assert {row["tensor"] for row in whole} == {"output", "dq", "dk", "dv"}
    assert {row["implementation"] for row in whole} == {"bmm"}
    outputs = [row for row in whole if row["tensor"] == "output"]
    assert sum(row["batch"] * row["heads"] for row in outputs) == 4 * CALLS["unet"]
    assert {row["layer"] for row in outputs if row["masked"]} == {
        row["layer"] for row in outputs if row["layer"].endswith("attn2")
    }
    assert not w.first_over, w.summary()


def test_they_are_judged_as_others_are() -> None:
    """Beside SDPA on the same weights: the same calls, of the same scores, beside the same plain attention."""
    model, given = made("unet", torch.bfloat16)
    seen = {}
    for processor in (AttnProcessor(), AttnProcessor2_0()):
        model.set_attn_processor(processor)
        with watch(model) as w:
            output(model, given)
        seen[type(processor)] = [row for row in w.rows if row["head"] is None]
    plain, fused = seen.values()
    assert [row["layer"] for row in plain] == [row["layer"] for row in fused]
    assert plain[0]["logit_max"] == pytest.approx(fused[0]["logit_max"])
    assert plain[0]["baseline_rmse"] == pytest.approx(fused[0]["baseline_rmse"])
    assert not any(row["over"] for row in (*plain, *fused))
    assert sum(row["ratio_rmse"] for row in plain) > sum(row["ratio_rmse"] for row in fused)  # which rounds P less


@pytest.mark.parametrize("in_place", [False, True])
def test_probabilities_that_are_changed_are_not_compared(in_place: bool) -> None:
    model, given = made("unet", torch.float32)
    model.set_attn_processor(Forgetful(in_place))
    with watch(model) as w, torch.no_grad():
        output(model, given)
    [(reason, count)] = w.skipped.items()
    assert count == CALLS["unet"]
    assert ("changed after the softmax" if in_place else "was not given as they were") in reason
