"""flash-attn's functions, where it is installed: here a module of its name and signatures, whose kernels are ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from assay.flash import compat
from assay.results.watched import badness
from assay.watching.watch import Watch, watch

STARTS = torch.tensor([0, 5, 5, 17], dtype=torch.int32)
KEY_STARTS = torch.tensor([0, 8, 8, 20], dtype=torch.int32)


def other(function: Any) -> Any:
    """The same function as another object: the package's, not ours."""
    same = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    same.__annotations__ = function.__annotations__
    return same


@pytest.fixture(scope="module")
def package() -> Iterator[ModuleType]:
    """`import flash_attn` finds it; models call its functions through it."""
    whole, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for name in compat.__all__:
        if name.startswith("flash_attn"):
            function = other(getattr(compat, name))
            setattr(interface, name, function)
            setattr(whole, name, function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", whole)
        patch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
        yield whole


class Calls(nn.Module):
    """A layer around one of the functions."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *tensors: Tensor) -> Tensor:
        found = self.attend(*tensors)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()


def results(model: nn.Module, tensors: list[Tensor]) -> list[Tensor]:
    out = model(*tensors)
    return [out.detach(), *torch.autograd.grad(out.float().square().mean(), tensors)]


Q, K, V = (2, 9, 4, 8), (2, 13, 2, 8), (2, 13, 2, 8)
PACKED_Q, PACKED_K = (17, 4, 8), (20, 2, 8)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
CALLS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "flash_attn_func": ([Q, K, V], lambda f, q, k, v: f(q, k, v, 0.0, 0.3, True, (4, -1), 0.0, SLOPES)),
    "flash_attn_kvpacked_func": ([Q, (2, 13, 2, 2, 8)], lambda f, q, kv: f(q, kv, causal=True, softcap=3.0)),
    "flash_attn_qkvpacked_func": ([(2, 9, 3, 4, 8)], lambda f, qkv: f(qkv, return_attn_probs=True)),
    "flash_attn_varlen_func": (
        [PACKED_Q, PACKED_K, PACKED_K],
        lambda f, q, k, v: f(q, k, v, STARTS, KEY_STARTS, 12, 12, causal=True, alibi_slopes=SLOPES),
    ),
    "flash_attn_varlen_kvpacked_func": (
        [PACKED_Q, (20, 2, 2, 8)],
        lambda f, q, kv: f(q, kv, STARTS, KEY_STARTS, 12, 12, window_size=(3, 2)),
    ),
    "flash_attn_varlen_qkvpacked_func": ([(17, 3, 4, 8)], lambda f, qkv: f(qkv, STARTS, 12, causal=True)),
}


def whole(w: Watch) -> dict[str, dict[str, Any]]:
    return {row["tensor"]: row for row in w.rows if row["head"] is None}


@pytest.mark.parametrize("against", ["baseline", "flash"])
@pytest.mark.parametrize("name", CALLS)
def test_every_function_is_found_with_its_gradients(name: str, against: str, package: ModuleType) -> None:
    shapes, call = CALLS[name]
    model = Calls(lambda *tensors: call(getattr(package, name), *tensors))
    tensors = [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    original = getattr(package, name)
    alone = results(model, tensors)
    with watch(model, against=against) as w:
        watched = results(model, tensors)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
    assert getattr(package, name) is original
    assert w.calls == 1  # not the functions that it calls in turn as well
    assert not w.skipped
    found = whole(w)
    assert set(found) == {"output", "dq", "dk", "dv"}
    for row in found.values():
        assert row["implementation"] == "flash_attn"
        assert row["heads"] == 4
        assert 0 < row["error_rmse"] < 0.05 * 8**0.5
        assert row["ratio_rmse"] < row["budget"], (row["tensor"], row["ratio_rmse"])
    packed = "varlen" in name
    assert found["output"]["batch"] == 2  # one sequence of the packed three is empty
    assert found["output"]["queries"] == (12 if packed else 9)


def test_a_packed_call_is_compared_sequence_by_sequence(package: ModuleType) -> None:
    """A kernel that lets sequences see each other is over budget."""

    def leaking(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *_: Any) -> Any:
        return compat.flash_attn_func(q[None], k[None], v[None])[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["flash_attn.flash_attn_interface"], "flash_attn_varlen_func", leaking)
        model = Calls(lambda *x: sys.modules["flash_attn.flash_attn_interface"].flash_attn_varlen_func(*x))
        with watch(model) as w, torch.no_grad():
            model(draw(*PACKED_Q), draw(*PACKED_K), draw(*PACKED_K), STARTS, KEY_STARTS, 12, 12)
    assert w.first_over is not None
    assert w.first_over["ratio_rmse"] > 10


def test_our_own_packed_call() -> None:
    """Its golden value is that of its sequences, each by itself."""
    import assay

    q, k, v = draw(1, 4, 17, 8), draw(1, 2, 20, 8, seed=1), draw(1, 2, 20, 8, seed=2)
    how: dict[str, Any] = {"cu_seqlens_q": STARTS, "cu_seqlens_k": KEY_STARTS, "causal": True}
    model = Calls(lambda q, k, v: assay.flash_attention(q, k, v, **how))
    with watch(model) as w:
        out = model(q, k, v)
    golden = torch.cat(
        [
            assay.golden_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal=True)
            for a, b, c, d in ((0, 5, 0, 8), (5, 17, 8, 20))
        ],
        2,
    )
    row = whole(w)["output"]
    assert row["implementation"] == "assay"
    assert row["error_max"] == pytest.approx((out.double() - golden).abs().max().item(), rel=1e-9)
    assert row["ratio_rmse"] < 2


@pytest.mark.parametrize("golden", [True, False])
@pytest.mark.parametrize("wrong", [None, torch.nan, 1.25])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_of_a_packed_call_the_worst_sequence_is_kept(
    number: int, wrong: float | None, golden: bool, tmp_path: Path, package: ModuleType
) -> None:
    """Not the longest, which is the second."""
    starts = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    own = slice(int(starts[number]), int(starts[number + 1]))

    def broken(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        out: Tensor = compat.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 9, 9)
        if wrong is None:
            return out
        out[own, 2] *= wrong  # one head of it
        return out

    q, k, v = (draw(17, 4, 8, seed=seed).detach() for seed in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["flash_attn.flash_attn_interface"], "flash_attn_varlen_func", broken)
        model = Calls(lambda *x: sys.modules["flash_attn.flash_attn_interface"].flash_attn_varlen_func(*x))
        with watch(model, golden=golden) as w, torch.no_grad():
            out = model(q, k, v, starts, starts)
    w.worst.save(tmp_path / "worst.safetensors")
    kept = load_file(tmp_path / "worst.safetensors")
    parts = [slice(int(a), int(b)) for a, b in pairwise(starts)]
    if wrong is None:
        own = max(parts, key=lambda part: _badness(out, q, k, v, part, golden))
    assert torch.equal(kept["q"][0].transpose(0, 1), q[own])
    assert torch.equal(kept["v"][0].transpose(0, 1), v[own])


def _badness(out: Tensor, q: Tensor, k: Tensor, v: Tensor, part: slice, golden: bool) -> float:
    """Of one sequence, by a watch of its own."""
    one, two, three = (x[part].transpose(0, 1)[None] for x in (q, k, v))
    model = Calls(lambda *_: F.scaled_dot_product_attention(one, two, three))
    with pytest.MonkeyPatch.context() as patch:
        given = out[part].transpose(0, 1)[None]
        patch.setattr(F, "scaled_dot_product_attention", lambda query, key, value: given)
        with watch(model, golden=golden) as w, torch.no_grad():
            model(q)
    assert w.worst.row is not None
    return badness(w.worst.row)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda p, q, k: p.flash_attn_func(q, q, q, 0.5), "dropout"),
        (lambda p, q, k: p.flash_attn_with_kvcache(q, k, k), "a cache of keys (flash_attn_with_kvcache)"),
        (
            lambda p, q, k: p.flash_attn_varlen_func(
                q[0], q[0], q[0], torch.tensor([0, 4, 9]), torch.tensor([0, 9, 9]), 5, 9
            ),
            "a sequence without queries, or without keys",
        ),
    ],
)
def test_what_is_not_compared_is_counted(call: Callable[..., Any], reason: str, package: ModuleType) -> None:
    model, q = Calls(lambda q, k: call(package, q, k)), draw(2, 9, 4, 8).detach()
    with watch(model) as w, torch.no_grad():
        model(q, draw(2, 13, 4, 8).detach())
    assert w.skipped == {reason: 1}
    assert w.calls == 0
