"""Captured calls: what a file says is what is made again, head by head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from assay.cases.attention.captured import captured, one_head
from assay.cases.attention.golden import golden_attention
from assay.cases.attention.inputs import describe_inputs, draw_inputs, how_called


def test_captured_inputs_give_a_head_for_a_seed(tmp_path: Path) -> None:
    q, k, v = torch.randn(2, 4, 10, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    path = tmp_path / "captured.safetensors"
    save_file({"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}, path)
    name = f"file:{path}"
    assert captured(path) == (8, (1, 1, 10, 8), 12, "bf16", False, False, False, "")
    drawn = draw_inputs(name, (1, 1, 1, 1), 7)  # batch 1, head 3, which reads key head 1
    assert torch.equal(drawn.q[0, 0], q[1, 3].bfloat16().double())
    assert torch.equal(drawn.k[0, 0], k[1, 1].bfloat16().double())
    assert drawn.grad.shape == (1, 1, 10, 8)
    assert describe_inputs(name) == "captured: captured.safetensors"
    with pytest.raises(ValueError, match="has 8 heads; a seed picks one"):
        draw_inputs(name, (1, 1, 1, 1), 8)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def band(queries: int, keys: int, left: int | None, right: int | None) -> Tensor:
    """Seen keys, by its definition."""
    seen = [
        [-math.inf if left is None else -left, j - (i + keys - queries), math.inf if right is None else right]
        for i in range(queries)
        for j in range(keys)
    ]
    return torch.tensor([low <= ahead <= high for low, ahead, high in seen]).view(queries, keys)


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)
ADDED, HIDDEN = draw(1, 4, 9, 13, seed=5), draw(2, 1, 1, 13, seed=6) > -1
AHEAD = (torch.arange(13)[None] - torch.arange(9)[:, None] - 4).abs()
SLOPING = -SLOPES.view(4, 1, 1) * AHEAD
CALLS: dict[str, tuple[dict[str, Tensor], dict[str, str], Tensor | None]] = {
    "scale": ({}, {"scale": "0.3"}, None),
    "causal": ({}, {"right": "0"}, band(9, 13, None, 0)),
    "as SDPA aligns it": ({}, {"right": "-4"}, band(9, 13, None, -4)),
    "window": ({}, {"left": "3", "right": "1"}, band(9, 13, 3, 1)),
    "bias": ({"bias": ADDED}, {}, ADDED),
    "hidden": ({"bias": HIDDEN}, {}, HIDDEN),
    "hidden in a window": ({"bias": HIDDEN}, {"left": "3"}, HIDDEN & band(9, 13, 3, None)),
    "bias in a window": ({"bias": ADDED}, {"left": "3"}, ADDED.masked_fill(~band(9, 13, 3, None), -math.inf)),
    "ALiBi": ({"alibi_slopes": SLOPES}, {}, SLOPING),
    "ALiBi, causal, hidden": (
        {"alibi_slopes": SLOPES, "bias": HIDDEN},
        {"right": "0"},
        SLOPING.masked_fill(~(HIDDEN & band(9, 13, None, 0)), -math.inf),
    ),
    "ALiBi and bias": ({"alibi_slopes": SLOPES, "bias": ADDED}, {}, SLOPING + ADDED),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_head_is_called_as_the_whole_was(name: str, tmp_path: Path) -> None:
    """Against torch's attention of the whole call in FP64."""
    tensors, notes, mask = CALLS[name]
    q, k, v = draw(2, 4, 9, 8), draw(2, 2, 13, 8, seed=1), draw(2, 2, 13, 8, seed=2)
    path = tmp_path / "call.safetensors"
    save_file({"q": q, "k": k, "v": v, **tensors}, path, metadata=notes)
    scale = float(notes["scale"]) if "scale" in notes else None
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    expected = expected.nan_to_num(0.0)  # rows that see no key
    call = captured(path)
    assert (call.causal, call.masked, call.told) == (False, mask is not None, True)
    for head in range(8):
        (one_q, one_k, one_v), how = one_head(path, head)
        out = golden_attention(one_q, one_k, one_v, scale=how.scale, bias=how.bias)
        torch.testing.assert_close(out[0, 0], expected.flatten(0, 1)[head], rtol=1e-12, atol=1e-13)


def test_a_causal_call_is_one_that_kernels_know(tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    save_file({name: draw(1, 2, 9, 8) for name in "qkv"}, path, metadata={"right": "0", "layer": "layers.3"})
    call = captured(path)
    assert (call.causal, call.masked, call.told) == (True, False, True)
    assert how_called(f"file:{path}", 1) == (None, None)
    assert describe_inputs(f"file:{path}") == "captured: call.safetensors, layers.3"
    path = tmp_path / "other.safetensors"
    save_file({name: draw(1, 2, 9, 8) for name in "qkv"}, path, metadata={"right": "0", "left": "2"})
    assert not captured(path).causal
    assert describe_inputs(f"file:{path}") == "captured: other.safetensors, masked"
    assert how_called("normal", 1) == (None, None)


@pytest.mark.parametrize(
    ("tensors", "notes", "says"),
    [
        ({}, {"softcap": "30.0"}, "had softcap, which plans do not know"),
        ({"sinks": torch.zeros(2)}, {"softcap": "30.0"}, "had softcap and sinks"),
        ({"bias": torch.zeros(3, 3)}, {}, "bias must broadcast to"),
        ({"bias": torch.zeros(9, dtype=torch.int64)}, {}, "bias must be float"),
        ({"alibi_slopes": torch.zeros(3)}, {}, "alibi_slopes must be float of shape"),
        ({}, {"scale": "-1"}, "scale must be a positive finite number, got -1"),
        ({}, {"scale": "much"}, "could not convert string to float: 'much'"),
        ({}, {"left": "far"}, "invalid literal for int"),
    ],
)
def test_calls_that_cannot_be_made_again(
    tensors: dict[str, Any], notes: dict[str, str], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "call.safetensors"
    save_file({name: torch.ones(1, 2, 9, 8) for name in "qkv"} | tensors, path, metadata=notes)
    with pytest.raises(ValueError, match=says) as error:
        captured(path)
    assert str(path) in str(error.value)


def test_what_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a file"):
        captured(tmp_path / "nowhere")
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"\x80\x04not a tensor")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        captured(junk)
    save_file({"q": torch.zeros(1, 1, 2, 2)}, junk)
    with pytest.raises(ValueError, match="must have tensors q, k and v; it has q"):
        captured(junk)
    save_file({name: torch.zeros(2, 2) for name in "qkv"}, junk)
    with pytest.raises(ValueError, match="must be float of shape"):
        captured(junk)


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (2, 4, 8, 4), "k": (1, 4, 8, 4), "v": (1, 4, 8, 4)},  # batch
        {"q": (1, 4, 8, 4), "k": (1, 2, 8, 4), "v": (1, 4, 8, 4)},  # heads of k and v
        {"q": (1, 4, 8, 4), "k": (1, 2, 8, 4), "v": (1, 2, 9, 4)},  # lengths of k and v
        {"q": (1, 4, 8, 4), "k": (1, 4, 8, 6), "v": (1, 4, 8, 4)},  # dim of q and k
        {"q": (1, 4, 8, 4), "k": (1, 3, 8, 4), "v": (1, 3, 8, 4)},  # heads that do not divide
    ],
)
def test_captured_tensors_must_fit_together(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    path = tmp_path / "captured.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    with pytest.raises(ValueError, match="must share the batch"):
        captured(path)


def test_captured_tensors_must_be_finite(tmp_path: Path) -> None:
    path = tmp_path / "captured.safetensors"
    save_file({name: torch.full((1, 1, 2, 2), float("nan")) for name in "qkv"}, path)
    with pytest.raises(ValueError, match="must be finite"):
        captured(path)
