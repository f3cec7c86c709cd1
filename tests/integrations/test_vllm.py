"""vLLM's plugin: registered in stand-ins for two versions, and run over paged caches. vLLM itself is not run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch

from assay.integrations import vllm_

from .fake_vllm import MAIN, RELEASE, installed
from .vllm_engine import PAGE, Engine

LIMIT = 2.0
"""Our error over plain attention's in the same format."""
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head for all": {"heads": (4, 1)},
    "no groups, size 40": {"heads": (2, 2), "size": 40},
    "tokens before heads": {"tokens_before_heads": True},
    "window": {"window": 20},
    "softcap": {"softcap": 2.0},
    "slopes": {"slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {
        "window": 30,
        "softcap": 3.0,
        "slopes": [0.3, 0.2, 0.1, 0.0],
        "sinks": torch.tensor([1.0, 0.0, -2.0, 0.5]),
        "tokens_before_heads": True,
    },
}


@pytest.fixture(params=[RELEASE, MAIN])
def registry(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with installed(request.param) as registry:
        vllm_.register_vllm()
        yield registry


@pytest.fixture
def release() -> Iterator[ModuleType]:
    with installed(RELEASE) as registry:
        vllm_.register_vllm()
        yield registry


@pytest.mark.parametrize("name", FEATURES)
def test_steps_of_an_engine(release: ModuleType, name: str) -> None:
    """Each step also checks, bit for bit, that the new keys are in their slots and nothing else has changed."""
    engine = Engine(release, **FEATURES[name])
    engine.run()
    assert engine.ratio <= LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_in_both_versions(registry: ModuleType, dtype: torch.dtype) -> None:
    engine = Engine(registry, dtype)
    assert dtype in engine.backend.supported_dtypes
    engine.run()
    assert engine.ratio <= LIMIT


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FEATURES)
def test_steps_on_the_gpu(release: ModuleType, name: str, dtype: torch.dtype) -> None:
    engine = Engine(release, dtype, "cuda", **FEATURES[name])
    engine.run()
    assert engine.ratio <= LIMIT


def test_a_wrong_window_is_noticed(release: ModuleType) -> None:
    """The judge can fail: the same run, told that the window is one key wider."""
    engine = Engine(release, window=20)
    engine.options["window"] = (20, 0)
    engine.run()
    assert engine.ratio > 100 * LIMIT


def test_pages_behind_the_window_may_be_gone(release: ModuleType) -> None:
    """vLLM frees them: its tables then name page 0, and what was there belongs to others."""
    engine = Engine(release, window=20)
    engine.step({"a": 60, "b": 3})
    sequence = engine.sequences["a"]
    for i in range(2):
        engine.cache[sequence.pages[i]] = engine.expected[sequence.pages[i]] = 77.0
        sequence.pages[i] = 0
    engine.step({"a": 1, "b": 1})
    engine.step({"b": 2, "a": 7})
    assert engine.ratio <= LIMIT


def test_a_token_without_a_slot_is_not_written(release: ModuleType) -> None:
    engine = Engine(release)
    common = engine.common({"a": 20, "b": 3})
    common.slot_mapping[[0, 5, 21]] = -1
    step = engine.builder.build(0, common)
    k, v = engine.draw(23, 2), engine.draw(23, 2)
    engine.impl.forward(None, engine.draw(23, 4), k, v, engine.cache, step, torch.empty(23, 4, 32))
    written = ~engine.cache.isnan().any(3).any(1)[1:]
    assert written.sum() == 20
    for token in (i for i in range(23) if i not in (0, 5, 21)):
        page, place = divmod(int(common.slot_mapping[token]), PAGE)
        assert engine.cache[page, :, place].equal(torch.cat((k[token], v[token]), -1))


def test_a_layer_that_shares_a_cache_only_reads(release: ModuleType) -> None:
    engine, reader = Engine(release), Engine(release, shared_with="layer")
    engine.step({"a": 20})
    before = engine.cache.clone()
    common, q = engine.common({"a": 1}), engine.draw(1, 4)
    common.seq_lens -= 1  # the layer that owns the cache would have written by now
    out = torch.empty(1, 4, 32)
    reader.impl.forward(
        None, q, engine.draw(1, 2), engine.draw(1, 2), engine.cache, engine.builder.build(0, common), out
    )
    torch.testing.assert_close(engine.cache, before, rtol=0, atol=0, equal_nan=True)
    again = torch.empty(1, 4, 32)
    engine.impl.forward(None, q, None, None, engine.cache, engine.builder.build(0, common), again)
    assert out.equal(again)
    assert not out.isnan().any()


def test_without_a_step_the_output_is_zero(release: ModuleType) -> None:
    engine = Engine(release)
    output = torch.full((3, 4, 32), torch.nan)
    engine.impl.forward(None, engine.draw(3, 4), engine.draw(3, 2), engine.draw(3, 2), torch.empty(0), None, output)
    assert output.equal(torch.zeros(3, 4, 32))


def test_the_steps_tensors_have_versions(release: ModuleType) -> None:
    """In inference mode the kernels' checks would read tensors without one again in every layer."""
    engine = Engine(release)
    engine.step({"a": 5})
    with torch.inference_mode():
        common = engine.common({"a": 1, "b": 30})
        assert common.seq_lens.is_inference()
        step = engine.builder.build(0, common)
    assert (step.decodes, step.tokens) == (1, 31)
    held = [getattr(x, field.name) for x in (step, step.chunks) for field in fields(x)]
    tensors = [x for x in held if isinstance(x, torch.Tensor)]
    assert len(tensors) == 9
    assert not any(x.is_inference() for x in tensors)
    step.of_a_wrapper = 1  # as vLLM's chunked local attention does


def test_the_cache_of_both_versions(registry: ModuleType) -> None:
    backend = registry.AttentionBackendEnum.CUSTOM.get_class()
    assert backend.get_name() == "CUSTOM"  # vLLM looks it up again by this name
    assert backend.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 128)
    assert backend.forward_includes_kv_cache_update


ASKED: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 32,
    "use_mla": False,
    "has_sink": True,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": (9, 0),
    "attn_type": "decoder",
    "has_sliding_window": True,
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"head_size": 256, "block_size": None, "kv_cache_dtype": None}, None),
        ({"kv_cache_dtype": "bfloat16"}, None),
        ({"head_size": 257}, "head size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "kv cache dtype"),
        ({"kv_cache_dtype": "float16"}, "float16 under a model of torch.bfloat16"),
        ({"block_size": 8}, "block size"),
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "mm prefix"),
        ({"use_per_head_quant_scales": True}, "per-head scales"),
        ({"attn_type": "encoder_only"}, "attention type"),
        ({"attn_type": "encoder_decoder"}, "attention type"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_kv_connector": True}, "KV connector"),
        ({"use_pcp": True}, "PCP"),
        ({"use_adaptive_verification": True}, "query lens mismatch"),
    ],
)
def test_what_vllm_asks(registry: ModuleType, changed: dict[str, Any], reason: str | None) -> None:
    reasons = registry.AttentionBackendEnum.CUSTOM.get_class().validate_configuration(**ASKED | changed)
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "not quantised.*fp8_e4m3"),
        ({"attn_type": "encoder"}, "decoders.*encoder"),
        ({"use_alibi_sqrt": True, "chunk_lookback": 2}, "does not know.*chunk_lookback.*use_alibi_sqrt"),
    ],
)
def test_layers_that_are_refused(release: ModuleType, changed: dict[str, Any], message: str) -> None:
    layer = release.AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
    with pytest.raises(ValueError, match=message):
        layer(4, 32, 0.1, 2, **changed)


def test_steps_that_are_refused(release: ModuleType) -> None:
    engine = Engine(release)
    common = engine.common({"a": 3})
    for causal in (False, torch.tensor([True])):
        with pytest.raises(ValueError, match="causal"):
            engine.builder.build(0, replace(common, causal=causal))
    with pytest.raises(ValueError, match="rswa_prefix_lens"):
        engine.builder.build(0, replace(common, rswa_prefix_lens=torch.tensor([2])))
    with pytest.raises(ValueError, match="mm_req_doc_ranges"):
        engine.builder.build(0, replace(common, mm_req_doc_ranges={0: [(0, 1)]}))
    q, k, v = engine.draw(3, 4), engine.draw(3, 2), engine.draw(3, 2)
    step = engine.builder.build(0, common)
    with pytest.raises(ValueError, match="quantise its output"):
        engine.impl.forward(None, q, k, v, engine.cache, step, q, output_scale=torch.ones(1))


def test_the_entry_point() -> None:
    with installed(RELEASE) as registry:
        custom = registry.AttentionBackendEnum.CUSTOM
        assert not custom.is_overridden()
        plugin = EntryPoint("assay", "assay.integrations.vllm_:plugin", "vllm.general_plugins").load()
        plugin()
        plugin()  # vLLM may call it again
        assert custom.get_class().__module__ == "assay.integrations.vllm_backend"
        assert not registry.AttentionBackendEnum.FLASH_ATTN.is_overridden()
        vllm_.unregister_vllm()
        assert not custom.is_overridden()
        vllm_.unregister_vllm()


def test_a_place_that_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with installed(MAIN) as registry:
        custom = registry.AttentionBackendEnum.CUSTOM
        registry.register_backend(custom, "theirs.Backend")
        with pytest.raises(ValueError, match=r"theirs\.Backend.*VLLM_PLUGINS"):
            vllm_.register_vllm()
        with caplog.at_level(logging.WARNING):
            vllm_.plugin()  # vLLM goes on without us
        assert "theirs.Backend" in caplog.text
        vllm_.unregister_vllm()
        assert custom.get_path() == "theirs.Backend"


@pytest.mark.parametrize("version", ["0.11.2", "0.25.1", "0.29.0", "1.0.0", "dev"])
def test_versions_that_are_not_supported(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with installed(version) as registry:
        with pytest.raises(ValueError, match=rf"0\.26 to 0\.28.*got {version}"):
            vllm_.register_vllm()
        vllm_.plugin()
        assert f"got {version}" in caplog.text
        assert not registry.AttentionBackendEnum.CUSTOM.is_overridden()


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0rc2", "0.28.1+cu130"])
def test_versions_that_are(version: str) -> None:
    with installed(version) as registry:
        vllm_.register_vllm()
        assert registry.AttentionBackendEnum.CUSTOM.is_overridden()


def test_a_version_that_lacks_something() -> None:
    with installed(RELEASE):
        del sys.modules["vllm.v1.attention.backend"].AttentionImpl
        with pytest.raises(ValueError, match=r"vLLM 0\.27\.1 has no vllm\.v1\.attention\.backend\.AttentionImpl"):
            vllm_.register_vllm()
    with installed(RELEASE):
        del sys.modules["vllm.v1.attention.backends.registry"]
        with pytest.raises(ValueError, match=r"vLLM 0\.27\.1 has no vllm\.v1\.attention\.backends\.registry.*0\.28"):
            vllm_.register_vllm()


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'vllm>=0\.26,<0\.29'"):
        vllm_.register_vllm()
