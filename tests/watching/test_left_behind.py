"""Whatever happens inside a watch, nothing of it stays."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode

from assay.results.lines import all_records
from assay.results.watch_record import WATCH
from assay.watching.watch import Watch, watch
from tests.watching.models import Layer, Stack, inputs, stack

HOOKS = torch.nn.modules.module


def functions() -> dict[tuple[str, str], int]:
    """Every function of every module that is loaded, by identity."""
    return {
        (name, attribute): id(value)
        for name, module in list(sys.modules.items())
        if name.startswith(("torch.nn", "assay", "tests", "transformers")) and module is not None
        for attribute, value in list(vars(module).items())
        if callable(value)
    }


class Breaks(Layer):
    """Fails after its attention."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ZeroDivisionError


class Empty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["body", "model", "backward", "comparison", "no attention", "unknown function"])
def test_also_after_an_exception(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Empty() if where == "no attention" else Stack(Layer(), Breaks() if where == "model" else Layer())
    x, also = inputs(torch.float32).requires_grad_(), {}
    if where == "comparison":
        monkeypatch.setattr("assay.watching.ledger.Ledger.output", fails)
    elif where == "backward":
        x.register_hook(fails)
    elif where == "unknown function":
        also = {lambda y: y: F.gelu}
    before = functions()

    def run() -> None:
        model(x).sum().backward()
        if where == "body":
            raise ZeroDivisionError

    expected = ValueError if where in ("no attention", "unknown function") else ZeroDivisionError
    with pytest.raises(expected), watch(model, also=also):
        run()
    assert functions() == before
    assert not HOOKS._global_forward_hooks
    assert not HOOKS._global_forward_pre_hooks
    monkeypatch.undo()
    again = stack(torch.float32)
    with watch(again) as w:  # the way is free
        again(inputs(torch.float32))
    assert w.calls == 3


def test_a_module_that_was_loaded_in_the_meantime() -> None:
    model, x = stack(torch.float32), inputs(torch.float32)
    original = F.scaled_dot_product_attention
    sys.modules.pop("tests.watching.late", None)
    with watch(model) as w:
        late = importlib.import_module("tests.watching.late")
        assert late.scaled_dot_product_attention is not original
        model(x)
    assert late.scaled_dot_product_attention is original
    q = torch.randn(1, 1, 3, 4)
    late.KEPT[0](q, q, q)  # one that could not be put back looks no more
    assert w.calls == w.found == 3


class Holds(Layer):
    """Keeps the function as its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def test_a_module_of_the_model_that_holds_the_function() -> None:
    model, x = Stack(Holds()), inputs(torch.float32)
    with watch(model) as w:
        model(x)
    assert w.calls == 1
    assert vars(model.layers[0])["attend"] is F.scaled_dot_product_attention


def test_watching_twice(tmp_path: Path) -> None:
    model, x = stack(torch.float32), inputs(torch.float32)
    with watch(model) as first:
        with pytest.raises(ValueError, match=r"being watched already.*do not nest"), watch(model, out=tmp_path / "b"):
            pass
        model(x)  # the first one goes on
    assert first.calls == 3
    assert not (tmp_path / "b").exists()
    before = functions()
    for _ in range(2):  # the same one again
        with first:
            model(x)
        assert first.calls == 3
    assert functions() == before


def test_no_attention_names_what_was_looked_for(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(ValueError) as error, watch(model, out=tmp_path):
        model(torch.zeros(2, 4))
    for words in ("No attention was found in Sequential", "scaled_dot_product_attention", "flash-attn", "also={fast"):
        assert words in str(error.value)
    assert not all_records(tmp_path, WATCH)


class Masked(nn.Module):
    """Attention with the mask that it is given."""

    def forward(self, q: Tensor, k: Tensor, mask: Any = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, mask)


@pytest.mark.parametrize("kind", [bias.causal_lower_right, bias.causal_upper_left])
def test_a_mask_of_an_unknown_kind_is_counted_and_the_model_goes_on(kind: Any) -> None:
    """torch's own kinds compute by themselves where they see `F.scaled_dot_product_attention` called."""
    q, k, model, mask = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4), Masked(), kind(5, 7)
    alone = model(q, k, mask)
    with watch(model) as w:
        assert torch.equal(model(q, k, mask), alone)
    assert w.skipped == {"a mask of the kind CausalBias": 1}
    assert "Not compared: 1 call with a mask of the kind CausalBias." in w.summary()


class Doubles(TorchFunctionMode):
    """Knows torch's attention by identity."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return 2 * out if func is F.scaled_dot_product_attention else out


def test_modes_still_know_which_function_is_called() -> None:
    q, k, model = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4), Masked()
    with Doubles():
        alone = model(q, k)
    for outer, inner in ((watch(model), Doubles()), (Doubles(), watch(model))):
        with outer, inner:
            assert torch.equal(model(q, k), alone)
        w = outer if isinstance(outer, Watch) else inner
        assert isinstance(w, Watch)
        assert w.first_over is not None  # for so it is: twice what attention gives


def test_our_own_attention_is_found_though_nobody_has_loaded_it() -> None:
    program = """
import sys, torch, assay
class Ours(torch.nn.Module):
    def forward(self, q):
        return assay.flash_attention(q, q, q)
with assay.watch(Ours()) as w:
    w._model(torch.randn(1, 1, 4, 8))
print(w.calls)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
