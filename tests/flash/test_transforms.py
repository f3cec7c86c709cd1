"""Attention under torch.compile, vmap and torch.func; derivatives that it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from assay import flash_attention, scaled_dot_product_attention
from assay.flash import ops
from assay.flash.compat import flash_attn_func, flash_attn_varlen_func
from assay.flash.decode import attention_with_cache
from assay.flash.rotary import Rotary
from tests.flash.inputs import CU, draw, qkv

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (5, 0)},
    "softcap and sinks": {"softcap": 5.0, "sinks": torch.zeros(4)},
    "bias": {"bias": draw(20, 20)},
    "mask": {"bias": draw(20, 20) > 0},
}


@pytest.mark.parametrize("name", FEATURES)
def test_compile_without_breaks(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attention(q * 2, k, v, **FEATURES[name])
        return out.square().sum()

    expected = torch.autograd.grad(step(q, k, v), (q, k, v))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(expected, torch.autograd.grad(compiled(q, k, v), (q, k, v)), strict=True):
        # Sums of 16, 20 and 20 products in another order: a window is torch's kernel where values may be looked at.
        assert (a - b).abs().max() <= 56 * torch.finfo(torch.float32).eps * max(1.0, b.abs().max().item())


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "packed": lambda q, k, v: flash_attention(q[:1], k[:1], v[:1], causal=True, cu_seqlens_q=CU),
    "dropout": lambda q, k, v: flash_attention(q, k, v, dropout_p=0.3, dropout_seed=5),
    "two head dimensions": lambda q, k, v: flash_attention(q, k, v[..., :8], causal=True),
    "drop-in": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    "flash-attn": lambda q, k, v: flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True),
    "flash-attn, packed": lambda q, k, v: flash_attn_varlen_func(
        q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), CU, CU, 15, 15, causal=True
    ),
    "in 8 bits": lambda q, k, v: flash_attention(q.detach(), k.detach(), v.detach(), causal=True, fp8=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_compile_other_calls(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    expected, found = CALLS[name](q, k, v), compiled(q, k, v)
    assert (found - expected).abs().max() < 1e-6
    if name != "in 8 bits":
        pairs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected))
        for a, b in zip(*pairs, strict=True):
            assert (a - b).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own, from torch 2.15 on
def test_opcheck() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(heads=(4, 2)))
    bias, slopes, sinks = draw(1, 4, 20, 20).requires_grad_(), torch.rand(2, 4), torch.zeros(4, requires_grad=True)
    options = (0.25, 10, 0, 5.0, 0.2, False, False, False, "")
    torch.library.opcheck(
        torch.ops.assay.flash_forward.default, (q, k, v, bias, slopes, sinks, None, None, torch.tensor(5), *options)
    )
    packed = [x.detach()[:1].transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    options = (0.25, 10, 0, 5.0, 0.0, False, False, False, "")
    torch.library.opcheck(torch.ops.assay.flash_forward.default, (*packed, None, None, None, CU, CU, None, *options))
    rest = (*(x.detach() for x in (q, k, v)), None, slopes, sinks.detach(), None, None, None, *options)
    out, lse = ops.attention(*rest)
    torch.library.opcheck(torch.ops.assay.flash_backward.default, (out, lse, torch.ones_like(out), None, False, *rest))


@pytest.mark.parametrize("name", FEATURES)
def test_compile_with_sizes_that_change(name: str) -> None:
    how = FEATURES[name]

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attention(q, k, v, **how)
        return out

    for heads in (4, 2) if name != "softcap and sinks" else (4,):
        q, k, v = qkv(heads=(heads, heads))
        expected: torch.Tensor = flash_attention(q, k, v, **how)
        assert (step(q, k, v) - expected).abs().max() < 1e-5


def test_a_mask_under_vmap_and_without_data() -> None:
    q, mask = draw(3, 2, 4, 10, 16), draw(3, 1, 1, 10, 10) > 0
    mapped = torch.vmap(lambda q, m: flash_attention(q, q, q, bias=m))(q, mask)
    expected = torch.stack([flash_attention(x, x, x, bias=m) for x, m in zip(q, mask, strict=True)])
    assert (mapped - expected).abs().max() < 1e-5
    with FakeTensorMode():
        fake = torch.empty(2, 4, 10, 16)
        assert flash_attention(fake, fake, fake, bias=torch.empty(10, 10, dtype=torch.bool)).shape == fake.shape


def test_vmap() -> None:
    q, k = draw(3, 2, 4, 10, 16), draw(2, 4, 12, 16)
    bias = draw(3, 1, 4, 10, 12)
    mapped = torch.vmap(lambda q, b: flash_attention(q, k, k, bias=b, window=(8, 0)))(q, bias)
    one_by_one = [flash_attention(q[i], k, k, bias=bias[i], window=(8, 0)) for i in range(3)]
    assert (mapped - torch.stack(one_by_one)).abs().max() < 1e-6
    with pytest.raises(ValueError, match="sinks"):
        torch.vmap(lambda q, s: flash_attention(q, k, k, sinks=s))(q, draw(3, 4))
    for randomness in ("same", "different"):  # with a seed that all share, and with one for each
        with pytest.raises(ValueError, match="vmap and dropout exclude each other"):
            torch.vmap(lambda q: flash_attention(q, k, k, dropout_p=0.5), randomness=randomness)(q)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"softcap": 5.0}, "flash_attention has no second derivative"),
        ({}, "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"),
    ],
    ids=["ours", "torch's kernel"],
)
def test_double_backward_is_refused(how: dict[str, Any], message: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    (grad,) = torch.autograd.grad(flash_attention(q, k, v, **how).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        grad.sum().backward()


OTHER = draw(1, 2, 20, 8, seed=2)
ANGLES = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3])
DIFFERENTIATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: flash_attention(x, x, x),
    "drop-in": lambda x: scaled_dot_product_attention(x, x, x),
    "mask": lambda x: scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(20, 20).tril().bool()),
    "softcap": lambda x: flash_attention(x, x, x, softcap=3.0),
    "window": lambda x: flash_attention(x, x, x, window=(3, 0)),
    "bias": lambda x: flash_attention(OTHER, OTHER, OTHER, bias=x[..., :1], window=(3, 0)),
    "rotary": lambda x: flash_attention(x, x, x, rotary=Rotary(ANGLES.cos(), ANGLES.sin())),
    "decode": lambda x: attention_with_cache(x, x, x),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in torch.func.jvp
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_forward_mode_is_refused(name: str) -> None:
    """Silently, the derivative would be 0: also in transforms of transforms, and where a gradient is recorded too."""
    function, x, tangent = DIFFERENTIATED[name], draw(1, 2, 20, 8), draw(1, 2, 20, 8, seed=1)
    jvp = torch.func.jvp
    ways: dict[str, Callable[[], Any]] = {
        "jvp": lambda: jvp(function, (x,), (tangent,)),
        "jacfwd": lambda: torch.func.jacfwd(function)(x),
        "jvp of vmap": lambda: jvp(torch.vmap(function), (x[None],), (tangent[None],)),
        "vmap of jvp": lambda: torch.vmap(lambda y: jvp(function, (y,), (y,)))(x[None]),
        "inner jvp": lambda: jvp(lambda y: jvp(lambda z: function(y) * z, (x,), (tangent,)), (x,), (tangent,)),
    }
    for way in ways.values():
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            way()
    with forward_ad.dual_level():
        for primal in (x, x.clone().requires_grad_()):
            dual = forward_ad.make_dual(primal, tangent)
            if name != "decode" or not primal.requires_grad:
                with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                    function(dual)
        assert torch.equal(function(x), function(x.clone()))  # without a tangent


@pytest.mark.parametrize("name", ["softcap", "window", "bias", "rotary", "mask"])
def test_gradients_of_torch_func_are_refused(name: str) -> None:
    x = draw(1, 2, 20, 8)
    transformed = torch.func.grad(lambda x: DIFFERENTIATED[name](x).sum())
    for way in (transformed, lambda x: torch.vmap(transformed)(x[None])):
        with pytest.raises(NotImplementedError, match=r"no gradient within torch.func.grad"):
            way(x)


def test_gradients_through_vmap() -> None:
    """Autograd's own gradient of a mapped call is no transform of it."""
    x = draw(3, 1, 2, 20, 8).requires_grad_()
    (found,) = torch.autograd.grad(torch.vmap(DIFFERENTIATED["softcap"])(x).square().sum(), x)
    one_by_one = torch.stack([DIFFERENTIATED["softcap"](y) for y in x])
    (expected,) = torch.autograd.grad(one_by_one.square().sum(), x)
    assert (found - expected).abs().max() < 1e-5
