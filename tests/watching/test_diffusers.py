"""diffusers' models, small and random, watched: every processor's attention is found, whichever it calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from assay.watching.watch import watch

diffusers = pytest.importorskip("diffusers")

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
