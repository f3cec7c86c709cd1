"""`use_for_sdpa`: who gets our attention inside, that torch's is back after, and what goes to torch's all the same."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import assay
from assay.integrations import sdpa
from assay.integrations.sdpa import use_for_sdpa


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The work is too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """FP16, in which ours and torch's differ in bits on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def causal(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that our function was called with."""
    shapes: list[torch.Size] = []

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append(query.shape)
        return assay.scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attention)
    return shapes


@pytest.mark.parametrize(
    "call",
    [
        causal,
        lambda q: imported_by_name(query=q, key=q, value=q, is_causal=True),
        lambda q: torch._C._nn.scaled_dot_product_attention(q, q, q, None, 0.0, True),
    ],
    ids=["function", "imported by name", "torch._C"],
)
def test_ours_inside_and_torchs_after(call: Callable[[Tensor], Tensor]) -> None:
    q = normal(2, 4, 40, 16)
    before = call(q)
    with use_for_sdpa():
        inside = call(q)
    assert torch.equal(inside, assay.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert not torch.equal(inside, before)
    assert torch.equal(call(q), before)


def test_functions_that_stand_in_for_torchs(ours: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever replaced torch's function, and calls it, gets ours all the same."""
    torchs = F.scaled_dot_product_attention

    def replacement(*args: Any, **kwargs: Any) -> Tensor:
        return torchs(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    with use_for_sdpa():
        causal(normal(1, 1, 4, 8))
    assert len(ours) == 1


def test_torchs_is_back_after_an_exception(ours: list[torch.Size]) -> None:
    def fails(q: Tensor) -> None:
        causal(q)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), use_for_sdpa():
        fails(normal(1, 1, 4, 8))
    causal(normal(1, 1, 4, 8))
    assert len(ours) == 1


def test_nesting_is_harmless(ours: list[torch.Size]) -> None:
    q = normal(1, 1, 4, 8)
    context = use_for_sdpa()
    with context:
        with context, use_for_sdpa():
            causal(q)
        causal(q)
        assert len(ours) == 2
    causal(q)
    assert len(ours) == 2


def test_another_thread_keeps_torchs(ours: list[torch.Size]) -> None:
    q = normal(1, 1, 4, 8)
    with use_for_sdpa():
        thread = threading.Thread(target=causal, args=(q,))
        thread.start()
        thread.join()
        assert not ours
        causal(q)
    assert ours == [q.shape]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_keeps_torchs(ours: list[torch.Size]) -> None:
    q = normal(1, 1, 4, 8)
    scripted = torch.jit.script(causal)
    with use_for_sdpa():
        scripted(q)
    assert not ours


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_multi_head_attention(ours: list[torch.Size], train: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, batch_first=True).train(train)
    x = normal(2, 9, 32, dtype=torch.float32)
    with torch.set_grad_enabled(train):
        expected = attention(x, x, x, need_weights=False)[0]
        with use_for_sdpa():
            out = attention(x, x, x, need_weights=False)[0]
            assert ours == [(2, 4, 9, 8)]
            attention(x, x, x)  # with weights, which attention proper does not give
    assert len(ours) == 1
    assert (out - expected).abs().max() < 1e-6


@pytest.mark.parametrize("ours_last", [True, False])
def test_beside_another_mode(ours: list[torch.Size], ours_last: bool) -> None:
    attention, x = nn.MultiheadAttention(16, 2), normal(5, 1, 16, dtype=torch.float32)
    first, second = (torch.device("cpu"), use_for_sdpa()) if ours_last else (use_for_sdpa(), torch.device("cpu"))
    with first, second:
        attention(x, x, x, need_weights=False)
        causal(normal(1, 1, 4, 8))
    assert len(ours) == 2


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.double().flatten()


def errors(model: nn.Module, golden: nn.Module, x: Tensor) -> list[float]:
    """Of the output, and of the gradient over all parameters, against the same model in FP64."""
    found = []
    for given in (model, golden):
        given.zero_grad()
        out = given(x.to(next(given.parameters()).dtype))
        out.double().square().sum().backward()
        found.append((out.detach().double(), torch.cat([_gradient(p) for p in given.parameters()])))
    return [(mine - true).square().mean().sqrt().item() for mine, true in zip(*found, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_encoder_within_budget(ours: list[torch.Size], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the error of the model with torch's attention, three times for gradients; by our operator, not ATen's."""
    monkeypatch.setattr("assay.flash.cpu_plain.takes", lambda *_: False)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    golden = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(dtype).double()
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(dtype)
    model.load_state_dict(golden.state_dict())
    x = normal(2, 33, 32, dtype=dtype)
    plain = errors(model, golden, x)
    assert not ours
    with use_for_sdpa():
        out, gradient = errors(model, golden, x)
    assert len(ours) == 4  # two layers, of golden too
    assert out <= 2 * plain[0]
    assert gradient <= 3 * plain[1]
    assert errors(model, golden, x) == plain


def test_encoder_leaves_its_fused_path(ours: list[torch.Size]) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = normal(2, 9, 32, dtype=torch.float32)
    with torch.no_grad():
        fused = model(x)
        with use_for_sdpa():
            out = model(x)
        assert len(ours) == 2
        assert torch.equal(model(x), fused)
    assert (out - fused).abs().max() < 1e-5


BACKWARDS: dict[str, Callable[[Tensor], None]] = {
    "Tensor.backward": lambda loss: loss.backward(),
    "autograd.backward": lambda loss: torch.autograd.backward(loss),
    "autograd.backward of several": lambda loss: torch.autograd.backward([loss], [torch.ones_like(loss)]),
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_checkpointing_computes_ours_again(ours: list[torch.Size], reentrant: bool, backward: str) -> None:
    q = normal(2, 2, 20, 8).requires_grad_()
    with use_for_sdpa():
        (expected,) = torch.autograd.grad(causal(q).square().sum(), q)
        assert len(ours) == 1
        BACKWARDS[backward](checkpoint(causal, q, use_reentrant=reentrant).square().sum())
    assert len(ours) == 3
    assert q.grad is not None
    assert torch.equal(q.grad, expected)


def test_checkpointing_under_autograd_grad(ours: list[torch.Size]) -> None:
    q = normal(2, 2, 20, 8).requires_grad_()
    with use_for_sdpa():
        (expected,) = torch.autograd.grad(causal(q).sum(), q)
        (gradient,) = torch.autograd.grad(checkpoint(causal, q, use_reentrant=False).sum(), q)
    assert len(ours) == 3
    assert torch.equal(gradient, expected)


def test_autocast(ours: list[torch.Size]) -> None:
    q = normal(1, 2, 20, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = causal(q)
        with use_for_sdpa():
            out = causal(q)
    assert out.dtype == expected.dtype == torch.bfloat16
    assert ours == [q.shape]


def test_vmap(ours: list[torch.Size]) -> None:
    q = normal(3, 2, 2, 8, 4)
    with use_for_sdpa():
        out = torch.vmap(causal)(q)
    assert ours == [(2, 2, 8, 4)]
    assert torch.equal(out, assay.scaled_dot_product_attention(q, q, q, is_causal=True))


def wide(*_: object) -> Tensor:
    q = normal(1, 2, 6, 300)
    return F.scaled_dot_product_attention(q, q, q)


def nested(layout: torch.layout) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*nested tensors is in prototype")
            parts = [normal(n, 2, 8, dtype=torch.float32) for n in (3, 5)]
            if layout == torch.strided:
                x = torch.nested.nested_tensor([part.transpose(0, 1) for part in parts])
            else:
                x = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
        return torch.cat([part.flatten() for part in F.scaled_dot_product_attention(x, x, x).unbind()])

    return call


def triangle() -> Tensor:
    q = normal(1, 2, 6, 8)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=causal_upper_left(6, 6))


def two() -> Tensor:
    x = TwoTensor(normal(1, 2, 6, 8), normal(1, 2, 6, 8, seed=1))
    first: Tensor = F.scaled_dot_product_attention(x, x, x).a  # type: ignore[attr-defined]
    return first


def per_sample() -> Tensor:
    gradient: Tensor = torch.func.grad(lambda q: causal(q).sum())(normal(1, 2, 6, 8))
    return gradient


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "wide heads": (wide, "head dimension must be 1 to 256, got 300"),
    "strided nested tensors": (nested(torch.strided), "plain tensors, got a nested one"),
    "jagged nested tensors": (nested(torch.jagged), "plain tensors, got a nested one"),
    "a mask that is no tensor of numbers": (triangle, "plain tensors, got CausalBias"),
    "a wrapper": (two, "plain tensors, got TwoTensor"),
    "torch.func.grad": (per_sample, "knows vmap alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ours_refuses_goes_to_torchs(name: str) -> None:
    call, reason = REFUSED[name]
    expected = call()
    with pytest.warns(UserWarning, match=reason) as heard, use_for_sdpa():
        out, again = call(), call()
    assert len(heard) == 1
    assert heard[0].filename == __file__
    assert torch.equal(out, expected)
    assert torch.equal(again, expected)


def test_what_both_refuse_is_torchs_error() -> None:
    q, k = normal(1, 4, 5, 8), normal(1, 3, 5, 8)
    refused = pytest.warns(UserWarning, match="pass enable_gqa=True")
    with refused, use_for_sdpa(), pytest.raises(RuntimeError, match="must match the size"):
        F.scaled_dot_product_attention(q, k, k)


@pytest.fixture
def graphs() -> Iterator[list[list[str]]]:
    """What the graphs call that were compiled with `compiled`."""
    torch._dynamo.reset()
    _GRAPHS.clear()
    yield _GRAPHS
    torch._dynamo.reset()


_GRAPHS: list[list[str]] = []


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        _GRAPHS.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    result: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True)
    return result


def has(graph: list[str], name: str) -> bool:
    return any(name in target for target in graph)


def test_compiled_outside_and_inside(graphs: list[list[str]]) -> None:
    q = normal(2, 4, 40, 16).requires_grad_()
    function = compiled(lambda q: causal(q.unflatten(1, (2, 2)).flatten(1, 2)))
    before = function(q)
    for _ in range(2):
        with use_for_sdpa():
            inside = function(q)
        assert torch.equal(inside, assay.scaled_dot_product_attention(q, q, q, is_causal=True))
        assert torch.equal(function(q), before)
    assert len(graphs) == 2  # one each: neither is taken for the other, nor compiled twice
    assert has(graphs[0], "scaled_dot_product_attention")
    assert has(graphs[1], "assay.flash_forward")
    assert not has(graphs[1], "scaled_dot_product_attention")


def test_compiled_with_the_context_inside(graphs: list[list[str]]) -> None:
    def function(q: Tensor) -> Tensor:
        with use_for_sdpa():
            q = causal(q)
        return causal(q)

    q = normal(2, 4, 40, 16)
    with torch.no_grad():
        assert torch.equal(compiled(function)(q), function(q))
    assert has(graphs[0], "assay.flash_forward")
    assert has(graphs[0], "scaled_dot_product_attention")


def test_compiled_multi_head_attention(graphs: list[list[str]]) -> None:
    attention = nn.MultiheadAttention(32, 4, batch_first=True).half()
    function = compiled(lambda x: attention(x, x, x, need_weights=False)[0])
    x = normal(2, 9, 32)
    with use_for_sdpa():
        assert torch.equal(function(x), attention(x, x, x, need_weights=False)[0])
    assert has(graphs[0], "assay.flash_forward")


def test_compiled_checkpointing_runs_uncompiled() -> None:
    torch._dynamo.reset()
    q = normal(2, 2, 20, 8).requires_grad_()
    function = torch.compile(lambda q: checkpoint(causal, q.cos(), use_reentrant=False).cos(), backend="eager")
    with use_for_sdpa():
        (expected,) = torch.autograd.grad(causal(q.cos()).cos().sum(), q)
        with pytest.warns(UserWarning, match="what is checkpointed runs uncompiled"):
            out = function(q)
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert torch.equal(out, causal(q.cos()).cos())
    assert torch.equal(gradient, expected)
    torch._dynamo.reset()


def test_compiled_what_ours_refuses(graphs: list[list[str]]) -> None:
    q = normal(1, 2, 6, 300)
    with pytest.warns(UserWarning, match="head dimension must be 1 to 256, got 300"), use_for_sdpa():
        out = compiled(causal)(q)
    assert has(graphs[0], "scaled_dot_product_attention")
    assert torch.equal(out, causal(q))


def test_compiled_fused_path_warns_and_can_be_turned_off(graphs: list[list[str]]) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).half().eval()
    x = normal(2, 9, 32)
    with torch.no_grad(), use_for_sdpa():
        with pytest.warns(UserWarning, match=r"set_fastpath_enabled\(False\)"):
            compiled(layer)(x)
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            compiled(layer)(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert not has(graphs[0], "assay.flash_forward")
    assert has(graphs[-1], "assay.flash_forward")
