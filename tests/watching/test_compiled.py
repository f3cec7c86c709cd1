"""Compiled models: they run uncompiled while they are watched, say why, and are compiled as before afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from assay.watching.watch import watch
from tests.watching.models import inputs, results, stack


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
