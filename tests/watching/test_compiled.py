"""Compiled models: they run uncompiled while they are watched, say why, and are compiled as before afterwards."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assay.watching.watch import watch
from tests.watching.models import Layer, Stack, inputs, results, stack


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["whole", "one layer", "in place", "layer in place"])
def test_it_says_why_and_every_layer_is_compared(how: str) -> None:
    model: Any = stack(torch.float32)
    x = inputs(torch.float32)
    alone = results(model, x)
    watched = model
    if how == "whole":
        watched = torch.compile(model, backend="eager")
    elif how == "one layer":
        model.layers[1] = torch.compile(model.layers[1], backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model.layers[1].compile(backend="eager")
    with (
        pytest.warns(UserWarning, match="cannot look into compiled code: it runs uncompiled") as heard,
        watch(watched) as w,
    ):
        found = results(watched, x)
    assert len(heard) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    layers = [row["layer"].replace("_orig_mod.", "").replace("._orig_mod", "") for row in w.rows if row["head"] is None]
    assert layers == [f"layers.{i}" for i in range(3)] + [f"layers.{i}" for i in (2, 1, 0) for _ in range(3)]


def test_what_was_compiled_stays_compiled() -> None:
    """Neither is it compiled again, nor is it compiled with the watch in it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    model, x = stack(torch.float32), inputs(torch.float32)
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    before = compiled(x)
    with pytest.warns(UserWarning, match="runs uncompiled"), watch(compiled):
        compiled(x)
    assert len(graphs) == 1
    assert torch.equal(compiled(x), before)
    assert len(graphs) == 1


def test_what_is_compiled_first_inside_runs_uncompiled_and_is_compiled_after() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    model, x = stack(torch.float32), inputs(torch.float32)
    with warnings.catch_warnings(), watch(model) as w:
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(model, backend=backend)
        compiled(x)
    assert w.calls == 3
    assert not graphs
    out = compiled(x)
    assert len(graphs) == 1
    assert torch.equal(out, model(x))
    assert all("watched" not in str(node.target) for node in graphs[0].graph.nodes)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def deep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return HELD["function"](q, k, v)


COMPILED = torch.compile(attend, backend="eager")
HELD: dict[str, Callable[..., Tensor]] = {}
"""Out of sight of whoever reads the model's methods."""


class Calls(nn.Module):
    """Attention by a function that it was given, or by one that its method names."""

    def __init__(self, function: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return COMPILED(x, x, x) if self.function is None else self.function(x, x, x)


@pytest.mark.parametrize("how", ["given", "named", "out of sight", "also"])
def test_a_compiled_function_is_named_and_its_calls_are_seen(how: str) -> None:
    HELD["function"] = torch.compile(attend, backend="eager")
    model = Calls({"given": COMPILED, "named": None, "out of sight": deep, "also": COMPILED}[how])
    x = inputs(torch.float32)
    alone = model(x)
    also = {COMPILED: attend} if how == "also" else None
    says = "The function attend is compiled, and the watch cannot look into compiled code"
    with pytest.warns(UserWarning, match=says) as heard, watch(model, also=also) as w:
        found = [model(x) for _ in range(2)]
    assert len(heard) == 1
    assert all(torch.equal(each, alone) for each in found)
    assert w.calls == 2


def test_a_compiled_function_that_the_model_does_not_know_is_not_named() -> None:
    model = Stack(Layer())  # from another file; COMPILED is loaded all the same
    with warnings.catch_warnings(), watch(model):
        warnings.simplefilter("error")
        model(inputs(torch.bfloat16).float())


FIRST = """
import sys, warnings
import torch
from assay.watching.watch import watch
from tests.watching.models import inputs, stack

model, x = stack(torch.float32), inputs(torch.float32)
assert "torch._dynamo" not in sys.modules
before = torch.compile
with warnings.catch_warnings(record=True) as heard, watch(model) as w:
    warnings.simplefilter("always")
    out = torch.compile(model, backend="eager")(x)
assert torch.equal(out, model(x))
assert torch.compile is before
assert torch._dynamo.eval_frame._stance.stance == "default"
print(w.calls, *[each.message for each in heard if "cannot look" in str(each.message)])
"""


def test_what_is_compiled_inside_before_anything_was_ever_compiled() -> None:
    """The compiler is loaded only then."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("3 What torch.compile was given is compiled, and the watch cannot look")
