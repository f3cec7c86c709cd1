"""torch's own layers, in all the ways they compute: through SDPA, with their weights, fused for inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import assay
from assay.watching.torch_layers import _encoder_layer, _fused_attention
from assay.watching.watch import Watch, watch
from tests.watching.models import HEADS, WIDTH, inputs

PADDING = torch.arange(21) >= torch.tensor([[21], [13]])
FUTURE = torch.ones(21, 21).triu(1).bool()
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": FUTURE},
    "both": {"attn_mask": FUTURE, "key_padding_mask": PADDING},
}
FUSED = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)


@pytest.fixture(autouse=True)
def nothing_is_left_patched() -> Any:
    weights = F.multi_head_attention_forward
    yield
    assert (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd) == FUSED
    assert F.multi_head_attention_forward is weights


def seen(w: Watch) -> list[tuple[str, str, str]]:
    return [(row["layer"], row["tensor"], row["implementation"]) for row in w.rows if row["head"] is None]


def attention(dtype: torch.dtype = torch.float32) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_fused_attention(mask: str, dtype: torch.dtype) -> None:
    model, x = attention(dtype).eval(), inputs(dtype)
    with torch.no_grad():
        alone = model(x, x, x, **MASKS[mask])
        with watch(model) as w:
            watched = model(x, x, x, **MASKS[mask])
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
    assert seen(w) == [("", "output", "fused_mha")]
    assert not w.first_over, w.summary()
    assert w.rows[-1]["error_rmse"] > 0


@pytest.mark.parametrize("mask", MASKS)
def test_fused_attention_written_out_is_what_torch_fuses(mask: str) -> None:
    """In FP64, with torch's own operation as the judge."""
    model, x = attention(torch.float64).eval(), inputs(torch.float64)
    called: list[Any] = []

    def note(*args: Any) -> Any:
        called.append(args)
        return FUSED[0](*args)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "_native_multi_head_attention", note)
        expected = model(x, x, x, need_weights=False, **MASKS[mask])[0]
        torch.testing.assert_close(_fused_attention(*called[0]), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("training", [True, False])
def test_with_its_weights_it_is_plain_by_itself(training: bool) -> None:
    model, x = attention().train(training), inputs(torch.float32)
    alone = model(x, x, x)
    with watch(model) as w:
        watched = model(x, x, x)
        watched[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
    assert seen(w) == [("", "output", "mha_with_weights")]
    assert w.rows[-1]["ratio_rmse"] == pytest.approx(1, abs=0.5)


def test_with_weights_and_dropout_it_is_counted_only() -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True)
    x = inputs(torch.float32)
    with watch(model) as w:
        model(x, x, x)
    assert w.skipped == {"dropout": 1}
    assert w.calls == 0


LAYERS = {
    "after": {"activation": "relu", "norm_first": False},
    "before": {"activation": "gelu", "norm_first": True},
}


def encoder(name: str, dtype: torch.dtype, nested: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    how: dict[str, Any] = LAYERS[name]
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True, **how)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested and not how["norm_first"]).to(dtype).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_fused_layer(name: str, nested: bool, dtype: torch.dtype) -> None:
    model, x = encoder(name, dtype, nested), inputs(dtype)
    with torch.no_grad():
        alone = model(x, src_key_padding_mask=PADDING)
        with watch(model) as w:
            watched = model(x, src_key_padding_mask=PADDING)
    assert torch.equal(watched, alone)
    assert seen(w) == [(f"layers.{number}", "output", "fused_layer") for number in range(2)]
    assert not w.first_over, w.summary()
    assert not w.skipped


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("masks", [{}, {"mask": FUTURE}, {"src_key_padding_mask": PADDING}])
@pytest.mark.parametrize("name", LAYERS)
def test_a_fused_layer_written_out_is_what_torch_fuses(name: str, masks: dict[str, Tensor]) -> None:
    called: list[Any] = []

    def note(*args: Any) -> Tensor:
        called.append((args, FUSED[1](*args)))
        return called[-1][1]  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "_transformer_encoder_layer_fwd", note)
        encoder(name, torch.float64, nested=True)(inputs(torch.float64), **masks)
        for arguments, expected in called:
            flat = torch.cat(expected.unbind()) if expected.is_nested else expected
            torch.testing.assert_close(_encoder_layer(*arguments), flat, rtol=1e-11, atol=1e-13)
    assert len(called) == 2


def test_a_decoder_s_two_kinds_of_attention() -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    x = inputs(torch.float32)
    with watch(model) as w:
        model(x, x)
    assert seen(w) == [("self_attn", "output", "sdpa"), ("multihead_attn", "output", "sdpa")]
    model.eval()
    with watch(model) as w, torch.no_grad():
        model(x, x)
    assert seen(w) == [("self_attn", "output", "fused_mha"), ("multihead_attn", "output", "sdpa")]


@pytest.mark.parametrize("watch_first", [True, False])
def test_beside_use_for_sdpa(watch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hold: attention inside of torch's layer is ours, and it is watched."""
    monkeypatch.setattr("assay.flash.cpu_plain.takes", lambda *_: False)  # never torch's own kernel
    model, x = attention().half(), inputs(torch.float16)
    with assay.use_for_sdpa():
        ours = model(x, x, x, need_weights=False)[0]
    w = watch(model)
    with w if watch_first else assay.use_for_sdpa(), assay.use_for_sdpa() if watch_first else w:
        out = model(x, x, x, need_weights=False)[0]
    assert torch.equal(out, ours)
    assert not torch.equal(out, model(x, x, x, need_weights=False)[0])
    assert seen(w) == [("", "output", "sdpa")]
