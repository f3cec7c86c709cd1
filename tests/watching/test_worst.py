"""The worst call: what is kept of it, and that it is the call that was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

import assay
from assay.cases.attention.captured import captured, one_head
from assay.cases.attention.golden import golden_attention
from assay.watching.watch import Watch, watch
from tests.watching.models import inputs, stack


class Calls(nn.Module):
    """One call of attention, ours or torch's."""

    def __init__(self, ours: bool, **how: Any) -> None:
        super().__init__()
        self.ours, self.how = ours, how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.ours:
            out: Tensor = assay.flash_attention(q, k, v, **self.how)
            return out
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.how)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def saved(w: Watch, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    w.worst.save(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}, file.metadata()


HIDDEN = torch.arange(13) < torch.tensor([13, 8]).view(2, 1, 1, 1)
CALLS: dict[str, tuple[bool, dict[str, Any]]] = {
    "nothing": (False, {}),
    "scale": (False, {"scale": 0.3}),
    "causal from the top left": (False, {"is_causal": True}),
    "causal from the bottom right": (True, {"causal": True}),
    "window": (True, {"window": (3, 1)}),
    "ALiBi": (True, {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}),
    "padding": (False, {"attn_mask": HIDDEN}),
    "padding, expanded": (False, {"attn_mask": HIDDEN.expand(2, 4, 9, 13)}),
    "bias": (False, {"attn_mask": draw(9, 13, seed=5)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_saved_is_what_was_called(name: str, tmp_path: Path) -> None:
    """The call made again from the file, head by head in FP64, is what the model got in FP32."""
    ours, how = CALLS[name]
    model, path = Calls(ours, **how), tmp_path / "deep" / "worst.safetensors"
    q, k, v = draw(2, 4, 9, 8), draw(2, 2, 13, 8, seed=1), draw(2, 2, 13, 8, seed=2)
    with watch(model) as w:
        out = model(q, k, v)
    tensors, notes = saved(w, path)
    assert torch.equal(tensors["q"], q)
    assert notes["implementation"] == ("assay" if ours else "sdpa")
    assert float(notes["scale"]) == how.get("scale", 8**-0.5)
    if "padding" in name:
        assert tensors["bias"].shape == (2, 1, 1, 13)  # not as it was expanded
    for head in range(8):
        (one_q, one_k, one_v), given = one_head(path, head)
        again = golden_attention(one_q, one_k, one_v, scale=given.scale, bias=given.bias)
        torch.testing.assert_close(out.flatten(0, 1)[head].double(), again[0, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [{"softcap": 3.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_what_no_sweep_knows_is_saved_and_refused_by_name(how: dict[str, Any], tmp_path: Path) -> None:
    model, path = Calls(True, **how), tmp_path / "worst.safetensors"
    with watch(model) as w:
        model(draw(1, 4, 9, 8), draw(1, 4, 9, 8, seed=1), draw(1, 4, 9, 8, seed=2))
    tensors, notes = saved(w, path)
    (name,) = how
    assert name in tensors or notes[name] == "3.0"
    with pytest.raises(ValueError, match=f"had {name}, which plans do not know"):
        captured(path)


def test_it_is_a_copy(tmp_path: Path) -> None:
    """Of a tensor that stands for q, k and v at once, too, and of one that is written to afterwards."""
    x = draw(1, 4, 9, 8)
    model, before = Calls(False), x.clone()
    with watch(model) as w:
        model(x, x, x)
    x.zero_()
    tensors, _ = saved(w, tmp_path / "worst.safetensors")
    assert all(torch.equal(tensors[name], before) for name in "qkv")


def test_a_nan_is_worse_than_any_error() -> None:
    original, calls = F.scaled_dot_product_attention, []

    def broken(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        out = original(query, key, value, **how)
        calls.append(out)
        if len(calls) == 2:
            return out.index_fill(2, torch.tensor([3]), torch.nan)
        return out + out.mean() if len(calls) == 3 else out

    model, x = stack(torch.float32), inputs(torch.float32)
    for golden in (True, False):
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", broken)
            with watch(nn.Sequential(*model.layers), golden=golden) as w, torch.no_grad():
                for layer in model.layers:
                    layer(x)
        assert w.worst.row is not None
        assert w.worst.row["layer"] == "1"


def test_one_bad_head_is_worse_than_a_call_that_is_a_little_worse_as_a_whole() -> None:
    original, calls = F.scaled_dot_product_attention, []

    def broken(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        out = original(query, key, value, **how).clone()
        calls.append(out)
        if len(calls) == 2:
            out[:, 3] *= 1 + 2e-6
        return out * (1 + 1.2e-6) if len(calls) == 3 else out

    model, x = stack(torch.float32), inputs(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", broken)
        with watch(nn.Sequential(*model.layers)) as w, torch.no_grad():
            for layer in model.layers:
                layer(x)
    ratios = {row["layer"]: row["ratio_rmse"] for row in w.rows if row["head"] is None}
    assert ratios["2"] > ratios["1"]
    assert w.worst.row is not None
    assert (w.worst.row["layer"], w.worst.row["head"]) == ("1", 3)


def test_nothing_to_save(tmp_path: Path) -> None:
    with watch(stack()) as w:
        pass
    with pytest.raises(ValueError, match="No call was compared"):
        w.worst.save(tmp_path / "worst.safetensors")
    assert not list(tmp_path.iterdir())
