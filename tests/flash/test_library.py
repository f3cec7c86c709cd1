"""Operators without the dispatcher: only where nobody else has anything to do with a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, profiler, profiler_legacy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from assay import flash_attention
from assay.flash import fp8, library, ops
from assay.flash.decode import attention_with_cache
from assay.flash.rotary import Rotary, rotated
from tests.flash.inputs import qkv

OPTIONS = (*6 * (None,), 0.25, None, 0, None, 0.0, False, False, False, "")
"""What comes after q, k and v."""


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = ops.attention(q, k, v, *OPTIONS)[0]
    return out


@contextmanager
def dispatched() -> Iterator[list[str]]:
    """The operators of ours that are asked for through the dispatcher."""
    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "assay":
                names.append(func.name())
            return func(*args, **kwargs or {})

    with Seen():
        yield names


class Functions(TorchFunctionMode):
    """Sees what is called by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def profiled() -> Any:
    return torch.profiler.profile(acc_events=True)  # else torch 2.11 warns


class Subclass(torch.Tensor):
    pass


def test_the_same_numbers_and_gradients() -> None:
    direct, through = (tuple(x.requires_grad_() for x in qkv()) for _ in range(2))
    out, expected = forward(*direct), torch.ops.assay.flash_forward.default(*through, *OPTIONS)[0]
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    grads = (torch.autograd.grad(x, leaves, dout) for x, leaves in ((out, direct), (expected, through)))
    for found, wanted in zip(*grads, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_plain_calls_are_passed_on(context: Callable[[], AbstractContextManager[Any]]) -> None:
    with context():
        assert library.is_passed_on((*qkv(), None, torch.nn.Parameter(torch.zeros(2)), False))


@pytest.mark.parametrize(
    "context",
    [
        dispatched,
        Functions,
        FakeTensorMode,
        forward_ad.dual_level,
        lambda: torch.device("cpu"),
        profiled,
        profiler.profile,
        profiler_legacy.profile,
    ],
)
def test_whoever_looks_sees_the_operator(context: Callable[[], AbstractContextManager[Any]]) -> None:
    q, k, v = qkv()
    with context():
        assert not library.is_passed_on((q, k, v))


def test_unusual_tensors_go_through_the_dispatcher() -> None:
    q, k, v = qkv()
    negated = torch.randn(q.shape, dtype=torch.complex64).conj().imag
    for x in (q.as_subclass(Subclass), negated, torch._efficientzerotensor(q.shape)):
        assert not library.is_passed_on((x, k, v))
    assert torch.equal(forward(negated, k, v), forward(negated.clone(), k, v))
    assert isinstance(forward(q.as_subclass(Subclass), k, v), Subclass)


def test_tensors_without_numbers_or_strides_go_through_the_dispatcher() -> None:
    q, k, v = qkv()
    nested = torch._nested_view_from_buffer(  # without the warning that the public way has
        q.flatten(), torch.tensor([[4, 20, 16]]), torch.tensor([[320, 16, 1]]), torch.tensor([0])
    )
    for x in (q.to("meta"), q.to_sparse(), nested):
        assert not library.is_passed_on((k, x, v))
    positions = torch.zeros(64, 8, device="meta")
    assert rotated(q.to("meta"), Rotary(positions, positions), 3).shape == q.shape


def test_below_autograd_nothing_is_recorded() -> None:
    """As in an operator of torch's that ours is the kernel of: it has a gradient of its own."""
    q, k, v = (x.requires_grad_() for x in qkv())
    with torch._C._AutoDispatchBelowAutograd():
        assert not forward(q, k, v).requires_grad
    with torch.inference_mode(), torch.enable_grad():
        out = forward(q, k, v)
    assert out.is_inference()
    assert not out.requires_grad


def test_options_arrive_as_pythons_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher would convert them; kernels take no numpy numbers."""
    taken: list[set[type]] = []

    def take(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append({type(x) for x in arguments if not isinstance(x, torch.Tensor)})
        return arguments[0], arguments[0]

    q, k, v = qkv()
    three: Any = np.float32(3)
    yes: Any = np.bool_(True)
    with monkeypatch.context() as patch:
        patch.setattr("assay.flash.attention.attention", take)
        patch.setattr(fp8, "attention_fp8", take)
        patch.setattr(fp8, "takes", lambda *_: True)
        patch.setattr("assay.flash.decode.decode", take)
        how: dict[str, Any] = {"scale": three, "softcap": three, "window": (np.int64(3), 2)}
        flash_attention(q, k, v, **how, dropout_p=np.float32(0.5), deterministic=yes)
        flash_attention(q, k, v, **how, fp8=True)
        of_cache: Any = attention_with_cache
        of_cache(q, k, v, **how, batch_invariant=yes)
    assert len(taken) == 3
    assert set().union(*taken) <= {int, float, bool, str, type(None)}


def test_transforms_go_through_the_dispatcher() -> None:
    asked = []

    def look(x: torch.Tensor) -> torch.Tensor:
        asked.append(library.is_passed_on((x,)))
        return x.sum()

    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    make_fx(look)(torch.ones(3))
    assert asked == 3 * [False]


def test_a_mode_sees_both_passes() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with dispatched() as names:
        forward(q, k, v).sum().backward()
    assert names == ["assay::flash_forward", "assay::flash_backward"]


def test_a_profiler_sees_both_passes() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with profiled() as found:
        forward(q, k, v).sum().backward()
    names = {event.name for event in found.events()}
    assert {"assay::flash_forward", "assay::flash_backward"} <= names


def test_a_profiler_of_all_threads_sees_another_ones_calls() -> None:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        torch.profiler.profile(acc_events=True, experimental_config=config) as found,
        ThreadPoolExecutor(1) as thread,
    ):
        thread.submit(forward, *qkv()).result()
    assert "assay::flash_forward" in {event.name for event in found.events()}


def test_in_inference_mode_results_are_of_it() -> None:
    with torch.inference_mode():
        assert forward(*qkv()).is_inference()


def test_checkpointed_and_hooked() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    expected = torch.autograd.grad(forward(q, k, v).square().sum(), (q, k, v))
    again = checkpoint(forward, q, k, v, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        saved = forward(q, k, v)
    for out in (again, saved):
        for found, wanted in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
            assert torch.equal(found, wanted)
