"""attn_implementation="assay" against transformers' own eager attention, in small random models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import assay.integrations

transformers = pytest.importorskip("transformers")
from tests.integrations.transformers_models import (  # noqa: E402
    DECODERS,
    MODELS,
    StaysDouble,
    build,
    padding,
    tokens,
    variant,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for a second one
    assay.integrations.register_transformers()
    yield
    assay.integrations.unregister_transformers()
    torch.set_num_threads(threads)


def trio(model: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Ours and eager in a dtype, and eager in FP64 with the same rounded weights."""
    eager = variant(model, "eager", dtype)
    return variant(eager, "assay", dtype), eager, variant(eager, "eager", torch.float64)


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def assert_within_budget(actual: Tensor, plain: Tensor, truth: Tensor, seen: Tensor | None = None) -> None:
    """At most twice as far from the truth as what eager attention gives, at the largest and on average."""
    ours, eager = ((x - truth)[seen if seen is not None else slice(None)] for x in (actual, plain))
    assert rms(ours) <= 2 * rms(eager)
    assert ours.abs().max() <= 2 * eager.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*MODELS])
def test_logits(name: str, side: str, dtype: torch.dtype) -> None:
    """At most twice as far from FP64 as eager in the same dtype."""
    given = {"input_ids": tokens(3, 17), "attention_mask": padding(side, 3, 17)}
    seen = given["attention_mask"].bool()
    if name == "t5":
        given["decoder_input_ids"], seen = tokens(3, 17), torch.ones(3, 17, dtype=torch.bool)
    ours, eager, golden = trio(build(name), dtype)
    with torch.no_grad():
        actual, plain = ours(**given).logits, eager(**given).logits
        with StaysDouble():
            truth = golden(**given).logits
    assert actual.isfinite().all()  # padding's own rows too, which see no key
    assert_within_budget(actual, plain, truth, seen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*MODELS])
def test_gradients(name: str, dtype: torch.dtype) -> None:
    """At most three times as far from FP64: each matrix, and all sinks. Padding on the left and on the right."""
    ids, seen = tokens(3, 17), padding("left", 3, 17)
    seen[1, -4:] = 0
    labels = ids.masked_fill(seen == 0, -100)
    labels[:, 1:][seen[:, :-1] == 0] = -100  # what only padding predicts
    given = {"input_ids": ids, "attention_mask": seen, "labels": labels}

    def gradients(model: Any) -> dict[str, Tensor]:
        model(**given).loss.backward()
        found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        sinks = [x for name, x in found.items() if name.endswith("sinks")]
        matrices = {name: x for name, x in found.items() if x.dim() > 1}
        return matrices | ({"sinks": torch.cat(sinks)} if sinks else {})

    models = trio(build(name), dtype)
    actual, plain = gradients(models[0]), gradients(models[1])
    with StaysDouble():
        truth = gradients(models[2])
    assert actual.keys() == plain.keys() == truth.keys()
    assert ("sinks" in truth) == (name == "gpt_oss")
    for key, exact in truth.items():
        assert rms(actual[key] - exact) <= 3 * rms(plain[key] - exact), key


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", [*DECODERS, "qwen2_moe"])
def test_generation(name: str, side: str, cache: str) -> None:
    """Token by token what eager says, past the window's length."""
    ours = build(name)
    seen = padding(side, 3, 8)
    given = {"attention_mask": seen, "max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    actual = ours.generate(tokens(3, 8) * seen, **given)
    expected = variant(ours, "eager", torch.float32).generate(tokens(3, 8) * seen, **given)
    assert torch.equal(actual, expected)
    assert len(actual[:, 8:].unique()) > 5


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_in_pieces(name: str, side: str, cache: str) -> None:
    """Several queries behind a cache that holds keys: they stand at its end, after which a static one has room."""
    ids, seen = tokens(2, 16), padding(side, 2, 16)

    def in_pieces(model: Any) -> Tensor:
        options = {"max_cache_len": 24} if cache == "StaticCache" else {}
        past = getattr(transformers, cache)(config=model.config, **options)
        pieces = []
        for start, end in [(0, 7), (7, 12), (12, 13), (13, 16)]:
            given = {"attention_mask": seen[:, :end], "past_key_values": past, "use_cache": True}
            pieces.append(model(ids[:, start:end], **given).logits)
        return torch.cat(pieces, 1)

    ours, eager, golden = trio(build(name), torch.float32)
    with torch.no_grad():
        actual, plain = in_pieces(ours), in_pieces(eager)
        with StaysDouble():
            truth = golden(ids, attention_mask=seen).logits
    assert_within_budget(actual, plain, truth, seen.bool())


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(given: str) -> None:
    """Two sequences in one row, told apart by their positions or by their boundaries, see only themselves."""
    ours, eager, golden = trio(build("mistral" if given == "position_ids" else "llama"), torch.float32)
    first, second = tokens(1, 9), tokens(1, 16)[:, 9:]
    packed = {"input_ids": torch.cat([first, second], 1), "use_cache": False}
    packed["position_ids"] = torch.cat([torch.arange(9), torch.arange(7)])[None]
    if given == "cu_seq_lens":
        packed |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 9, 16], dtype=torch.int32))
        packed["use_cache"] = True  # with a cache transformers looks at no positions, and makes no mask
    with torch.no_grad():
        actual = ours(**packed).logits
        plain = torch.cat([eager(x).logits for x in (first, second)], 1)
        with StaysDouble():
            truth = torch.cat([golden(x).logits for x in (first, second)], 1)
    assert_within_budget(actual, plain, truth)


def test_a_mask_of_ones_own() -> None:
    """Four dimensions, bool or float, are taken as they are, also against the causal order."""
    ours, eager, golden = trio(build("llama"), torch.float32)
    ids = tokens(2, 9)
    seen = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    seen |= torch.eye(9, dtype=torch.bool)
    added = torch.zeros(2, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        plain = eager(ids, attention_mask=added).logits
        with StaysDouble():
            truth = golden(ids, attention_mask=added.double()).logits
        for mask in (seen, added):
            assert_within_budget(ours(ids, attention_mask=mask).logits, plain, truth)


@pytest.mark.parametrize("keys", [4, 6, 9])
def test_without_a_mask(keys: int) -> None:
    """Causal counts from the first key, as in torch; `is_causal` of the call has the last word over the module's."""
    q, k, v = (
        torch.randn(1, heads, length, 16, generator=torch.Generator().manual_seed(heads))
        for heads, length in [(4, 6), (2, keys), (2, keys)]
    )
    module, attention = build("llama").model.layers[0].self_attn, transformers.AttentionInterface()["assay"]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    causal, weights = attention(module, q, k, v, None)
    assert weights is None
    torch.testing.assert_close(causal, sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2))
    whole, _ = attention(module, q, k, v, None, is_causal=False)
    torch.testing.assert_close(whole, sdpa(q, k, v, enable_gqa=True).transpose(1, 2))
    last, _ = attention(module, q[:, :, -1:], k, v, None)
    torch.testing.assert_close(last, whole[:, -1:])


def test_dropout_only_in_training() -> None:
    """Half of the probabilities, doubled: zero on average against the undropped output, and only while training."""
    model = build("llama", attention_dropout=0.5)
    module = model.model.layers[0].self_attn
    attention = transformers.AttentionInterface()["assay"]
    q, k, v = (torch.randn(1, heads, 8, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    assert torch.equal(attention(module, q, k, v, None, dropout=0.5)[0], attention(module, q, k, v, None)[0])
    module.train()
    torch.manual_seed(0)
    draws = torch.stack([attention(module, q, k, v, None, dropout=0.5)[0] for _ in range(400)])
    torch.manual_seed(0)
    assert torch.equal(draws[0], attention(module, q, k, v, None, dropout=0.5)[0])
    error = (draws.mean(0) - attention(module, q, k, v, None)[0]) / (draws.std(0) / 400**0.5)
    assert 0.5 < rms(error) < 1.5  # in standard errors of the mean


def test_compiles_in_one_graph() -> None:
    """No graph break of ours, forward and backward."""
    model, seen = build("llama", num_hidden_layers=1), padding("left", 2, 12)
    given = {"attention_mask": seen, "use_cache": False}
    expected = model(tokens(2, 12), **given).logits[seen.bool()]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    actual = compiled(tokens(2, 12), **given).logits[seen.bool()]
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


def test_compiles_layer_by_layer() -> None:
    """The mask is then made outside, as a rule, and read inside."""
    model, seen = build("mistral", num_hidden_layers=1), padding("left", 2, 12)
    with torch.no_grad():
        expected = model(tokens(2, 12), attention_mask=seen).logits[seen.bool()]
        model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
        actual = model(tokens(2, 12), attention_mask=seen).logits[seen.bool()]
    torch.testing.assert_close(actual, expected)


def test_compiles_decoding_with_a_static_cache() -> None:
    model, seen = build("llama", num_hidden_layers=1), padding("left", 2, 6)
    given = {"attention_mask": seen, "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(tokens(2, 6) * seen, **given)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(model.generate(tokens(2, 6) * seen, **given), expected)


def test_gradient_checkpointing() -> None:
    """Computed again in the backward pass, with the same mask; reentrant and not."""
    gradients = []
    for reentrant in (None, True, False):
        model = build("mistral").train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(tokens(2, 12), attention_mask=padding("left", 2, 12), use_cache=False).logits[:, -1].sum().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert gradients[0].abs().max() > 0
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def mappings() -> list[dict[str, Any]]:
    return [transformers.AttentionInterface._global_mapping, transformers.AttentionMaskInterface._global_mapping]


def test_registering_twice_and_taking_it_back() -> None:
    model, before = build("llama"), [dict(x) for x in mappings()]
    assay.integrations.register_transformers()
    for _ in range(2):
        assay.integrations.unregister_transformers()
        assert not any("assay" in mapping for mapping in mappings())
    with pytest.raises(KeyError, match="assay"):
        model(tokens(1, 4))
    with pytest.raises(ValueError, match='"assay"` is not supported'):
        build("llama")
    assay.integrations.register_transformers()
    assert mappings() == before


@pytest.mark.parametrize("place", [0, 1])
def test_a_name_that_is_taken(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assay.integrations.unregister_transformers()
    monkeypatch.setitem(mappings()[place], "assay", rms)
    before = [dict(x) for x in mappings()]
    with pytest.raises(ValueError, match=r"must not have another 'assay' yet, got .*test_transformers\.rms"):
        assay.integrations.register_transformers()
    assay.integrations.unregister_transformers()  # not ours: it stays
    assert mappings() == before


@pytest.mark.parametrize("version", ["4.57.6", "6.0.0.dev0"])
def test_versions_out_of_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ValueError, match=rf"range transformers>=5,<6, got {version}: pip install"):
        assay.integrations.register_transformers()
    monkeypatch.undo()


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"not installed: pip install 'transformers>=5,<6'"):
        assay.integrations.register_transformers()
    monkeypatch.undo()


def test_nothing_is_imported_unasked() -> None:
    program = "import sys, assay.integrations; print([x for x in ('torch', 'transformers') if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


UNKNOWN = {
    "a list": [[1.0]],
    "whole numbers": torch.ones(1, 1, 6, 6, dtype=torch.long),
    "two dimensions": torch.ones(6, 6, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_mask_of_an_unknown_kind(kind: str) -> None:
    q, attention = torch.randn(1, 4, 6, 16), transformers.AttentionInterface()["assay"]
    with pytest.raises(ValueError, match=r"= \(1, 4, 6, 6\), bool .* or float .*; got"):
        attention(torch.nn.Identity(), q, q, q, UNKNOWN[kind])


def test_a_mask_of_another_size() -> None:
    q, attention = torch.randn(1, 4, 6, 16), transformers.AttentionInterface()["assay"]
    with pytest.raises(ValueError, match=r"must broadcast to .* = \(1, 4, 6, 6\), got \(1, 1, 6, 5\)"):
        attention(torch.nn.Identity(), q, q, q, torch.ones(1, 1, 6, 5, dtype=torch.bool))


def test_what_we_cannot_give() -> None:
    """Weights, and attention of another kind: refused instead of dropped in silence."""
    with pytest.raises(ValueError, match=r"output_attentions=True.*attn_implementation='eager'"):
        build("llama")(tokens(1, 4), output_attentions=True)
    q, attention = torch.randn(1, 4, 6, 16), transformers.AttentionInterface()["assay"]
    for name in ("indices", "block_indices", "cache"):
        with pytest.raises(ValueError, match=r"Identity .* does not: use attn_implementation='sdpa' or 'eager'"):
            attention(torch.nn.Identity(), q, q, q, None, **{name: object()})
