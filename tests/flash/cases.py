"""Calls for the tests of every device: drawn inputs, our result, and what the reference says about them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from assay.flash import cpu, ops
from assay.flash.call import Call
from assay.flash.cpu_dropout import philox
from assay.flash.layout import empty_gradient, empty_output

from .reference import reference_attention

GRADIENTS = ("q", "k", "v", "bias", "sinks")
Results = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and features. Packed: `packed` holds (queries, keys) of every sequence."""

    batch: int = 2
    heads: tuple[int, int] = (4, 4)
    queries: int = 70
    keys: int = 70
    dims: tuple[int, int] = (16, 16)
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    bias: tuple[int, int, int, int] | None = None
    """Which dimensions of the bias are whole; 0 stands for 1."""
    mask: tuple[int, int, int, int] | None = None
    packed: tuple[tuple[int, int], ...] | None = None
    dropout: float = 0.0
    lse_gradient: bool = False
    transposed: bool = False
    """Inputs of the layout (B, N, H, D)."""
    strided: bool = False
    """Inputs whose last dimension is not dense."""


class Drawn:
    """The tensors of a case in one dtype."""

    def __init__(self, case: Case, dtype: torch.dtype, seed: int = 0) -> None:
        self.case, self.dtype, self.generator = case, dtype, torch.Generator().manual_seed(seed)
        self.lengths = case.packed or ((case.queries, case.keys),)
        self.batch = 1 if case.packed else case.batch
        queries, keys = (sum(length[i] for length in self.lengths) for i in (0, 1))
        (heads, kv_heads), (dim, dim_v) = case.heads, case.dims
        self.q, self.dout = (self._normal(heads, queries, d) for d in case.dims)
        self.k = self._normal(kv_heads, keys, dim)
        self.v = self._normal(kv_heads, keys, dim_v)
        self.dlse = torch.randn(self.batch, heads, queries, generator=self.generator) if case.lse_gradient else None
        full = (self.batch, heads, queries, keys)
        self.bias: torch.Tensor | None = None
        if case.bias is not None:
            self.bias = torch.randn(_shape(case.bias, full), generator=self.generator).to(dtype)
        if case.mask is not None:
            self.bias = torch.rand(_shape(case.mask, full), generator=self.generator) < 0.5
            if case.mask[2]:
                self.bias[..., ::3, :] = False  # rows that see nothing
            self.bias[..., :5] = False  # keys that nobody sees
        self.sinks = torch.randn(heads, generator=self.generator).to(dtype) if case.sinks else None
        slopes = (len(case.packed) if case.packed else case.batch, heads)
        self.slopes = torch.rand(slopes, generator=self.generator) if case.alibi else None
        self.seed = torch.tensor(-(2**40) - 12345)

    def _normal(self, heads: int, length: int, dim: int) -> torch.Tensor:
        step = 2 if self.case.strided else 1
        shape = (length, heads) if self.case.transposed else (heads, length)
        x = torch.randn(self.batch, *shape, dim * step, generator=self.generator).to(self.dtype)
        return (x.transpose(1, 2) if self.case.transposed else x)[..., ::step]

    def cu_seqlens(self, which: int) -> torch.Tensor | None:
        if self.case.packed is None:
            return None
        lengths = torch.tensor([0, *(length[which] for length in self.lengths)])
        return lengths.cumsum(0).to(self.q.device, torch.int32)

    def to(self, device: str) -> Drawn:
        """The same numbers on another device."""
        other = copy(self)
        for name in ("q", "k", "v", "dout", "dlse", "bias", "sinks", "slopes", "seed"):
            x = getattr(self, name)
            setattr(other, name, None if x is None else x.to(device))
        return other

    def call(self) -> Call:
        case = self.case
        left, right = case.window or (None, None)
        return Call(
            q=self.q,
            k=self.k,
            v=self.v,
            scale=case.dims[0] ** -0.5,
            left=left,
            right=min(0, right or 0) if case.causal else right,
            softcap=case.softcap,
            bias=self.bias,
            slopes=self.slopes,
            sinks=self.sinks,
            cu_seqlens_q=self.cu_seqlens(0),
            cu_seqlens_k=self.cu_seqlens(1),
            dropout=case.dropout,
            seed=self.seed if case.dropout else None,
        )

    def keep(self) -> torch.Tensor | list[torch.Tensor] | None:
        case = self.case
        if not case.dropout:
            return None
        batches = range(len(case.packed)) if case.packed else range(case.batch)
        masks = []
        for b in batches:
            queries, keys = self.lengths[b] if case.packed else self.lengths[0]
            heads = b * case.heads[0] + torch.arange(case.heads[0])[None, :, None, None]
            counter = (torch.arange(keys), torch.arange(queries)[:, None], heads, torch.zeros(keys, dtype=torch.int64))
            word = philox(counter, (int(self.seed) & 0xFFFFFFFF, int(self.seed) >> 32 & 0xFFFFFFFF))[0]
            masks.append((word >= int(case.dropout * 2**32)).to(self.q.device))
        return masks if case.packed else torch.cat(masks)


def ours(drawn: Drawn, backend: Any = cpu) -> Results:
    """Output, LSE and gradients of what runs below the operators."""
    call = drawn.call()
    out, lse = backend.forward(call)
    needs_bias = call.bias is not None and call.bias.is_floating_point()
    dlse = None if drawn.dlse is None else drawn.dlse.to(lse.dtype)
    grads = backend.backward(call, out, lse, drawn.dout, dlse, needs_bias=needs_bias)
    assert out.dtype == call.q.dtype
    assert lse.dtype == (torch.float64 if call.q.dtype == torch.float64 else torch.float32)
    results = {"out": out, "lse": lse}
    for name in GRADIENTS:
        given, grad = getattr(call, name), getattr(grads, name)
        if given is not None and given.is_floating_point():
            assert grad.shape == given.shape
            assert grad.dtype == given.dtype
            results[f"d{name}"] = grad
    assert _strides(out) == _strides(empty_output(call.q, call.v.shape[-1]))
    assert lse.is_contiguous()
    for name in ("q", "k", "v"):
        assert _strides(results[f"d{name}"]) == _strides(empty_gradient(getattr(call, name)))
    return results


def by_operator(drawn: Drawn, deterministic: bool = False) -> Results:
    """The same by the operator that torch sees, on the device of the inputs, with autograd's gradients."""
    call = drawn.call()
    leaves = {name: getattr(call, name) for name in GRADIENTS}
    leaves = {
        name: x.detach().requires_grad_() for name, x in leaves.items() if x is not None and x.is_floating_point()
    }
    bias, sinks = leaves.get("bias", call.bias), leaves.get("sinks")
    out, lse = ops.attention(
        leaves["q"], leaves["k"], leaves["v"], bias, call.slopes, sinks, call.cu_seqlens_q, call.cu_seqlens_k,
        call.seed, call.scale, call.left, call.right, call.softcap, call.dropout, deterministic, False, False, "",
    )  # fmt: skip
    results, their_gradients = [out], [drawn.dout]
    if drawn.dlse is not None:
        results, their_gradients = [out, lse], [drawn.dout, drawn.dlse.to(lse.dtype)]
    grads = torch.autograd.grad(results, list(leaves.values()), their_gradients)
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def theirs(drawn: Drawn, dtype: torch.dtype) -> Results:
    """The same by the reference, computed in `dtype` from the same numbers."""
    case, leaves = drawn.case, {}
    for name in GRADIENTS:
        x = getattr(drawn, name)
        if x is not None and x.is_floating_point():
            leaves[name] = x.detach().to(dtype).requires_grad_()
    rest: dict[str, Any] = {"bias": drawn.bias, "sinks": None}
    rest |= {name: leaves.pop(name) for name in ("bias", "sinks") if name in leaves}
    out, lse = reference_attention(
        **leaves,
        **rest,
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        alibi_slopes=drawn.slopes,
        cu_seqlens_q=drawn.cu_seqlens(0),
        cu_seqlens_k=drawn.cu_seqlens(1),
        keep=drawn.keep(),
        dropout=case.dropout,
    )
    loss = (out * drawn.dout.to(dtype)).sum()
    if drawn.dlse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * drawn.dlse.to(dtype)).sum()
    leaves |= {name: x for name, x in rest.items() if x is not None and x.is_floating_point()}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    results = {"out": out.detach(), "lse": lse.detach()}
    return results | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def check_against_plain(drawn: Drawn, compute: Callable[[Drawn], Results] = ours) -> None:
    """At most twice the error of plain attention in the same dtype (gradients: three times), plus a few roundings.

    Of a row that sees one key, plain attention's dS is exactly 0; ours is dP − delta, a rounding of FP32 away from it.
    The LSE is kept in units of log₂ on the way: two roundings of FP32 more. The gradient of a sink is one number, so
    plain attention may be right by luck; ours is off by what rounding the output does to delta.

    In FP32 both have the errors of sums, which depend on the machine's matrix products (numpy's in the interpreter,
    torch's for plain attention), and the largest of a few thousand on luck: by six seeds 1.0 to 2.7 times plain
    attention's, where the RMSE is 1.2 to 1.5 times. So there it is the RMSE, and twice as much for the largest.
    """
    dtype = drawn.q.dtype
    truth, plain = theirs(drawn, torch.float64), theirs(drawn, dtype)
    eps = torch.finfo(torch.float32).eps
    gradients = max(largest(x) for name, x in truth.items() if name.startswith("d"))
    sizes = max(rms(x) for name, x in truth.items() if name.startswith("d"))
    for name, x in compute(drawn).items():
        exact = truth[name][truth[name].isfinite()]
        rounded = exact.to(dtype)
        floor = 2 * largest((rounded + 0.3 - 0.3).double() - rounded.double())
        factor = 3 if name.startswith("d") else 2
        more = {"out": 0.0, "lse": 2 * eps * largest(truth["lse"])}.get(name, 4 * eps * gradients)
        if name == "dsinks" and drawn.sinks is not None:
            off = (drawn.dout.double() * truth["out"]).abs().sum(-1) * torch.finfo(dtype).eps / 2
            more += largest((torch.exp(drawn.sinks.double()[:, None] - truth["lse"]) * off).sum((0, 2)))
        if dtype == torch.float32:
            few = 2 * rms((rounded + 0.3 - 0.3).double() - rounded.double())
            few += {"out": 0.0, "lse": 2 * eps * rms(exact)}.get(name, 4 * eps * sizes)
            assert rms(distances(x, truth[name])) <= factor * rms(distances(plain[name], truth[name])) + few, name
            factor *= 2
        assert error(x, truth[name]) <= factor * error(plain[name], truth[name]) + floor + more, name


def distances(x: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Where the truth is finite."""
    return (x.double() - truth)[truth.isfinite()]


def rms(x: torch.Tensor) -> float:
    """The root of the mean square, 0 of nothing."""
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest distance; where the truth is infinite, `x` must be it."""
    finite = truth.isfinite()
    assert torch.equal(x[~finite].double(), truth[~finite])
    return (x.double() - truth)[finite].abs().max().item() if finite.any() else 0.0


def _strides(x: torch.Tensor) -> list[int]:
    """Those that matter."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()]


def largest(x: torch.Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _shape(whole: tuple[int, int, int, int], full: tuple[int, int, int, int]) -> tuple[int, ...]:
    return tuple(size if kept else 1 for kept, size in zip(whole, full, strict=True))


WHOLE = (1, 1, 1, 1)
CASES = {
    "plain": Case(),
    "causal": Case(causal=True),
    "causal, more keys": Case(causal=True, queries=37, keys=90),
    "causal, more queries": Case(causal=True, queries=90, keys=37),
    "gqa": Case(heads=(6, 2), causal=True),
    "mqa": Case(heads=(5, 1), queries=40, keys=75),
    "window left": Case(window=(9, None)),
    "window right": Case(window=(None, 4), queries=50),
    "window both": Case(window=(20, 3), keys=50),
    "window causal": Case(window=(13, None), causal=True, heads=(4, 2), queries=33),
    "window behind": Case(window=(30, -7)),
    "window of nothing": Case(window=(3, -5), sinks=True),
    "softcap": Case(softcap=1.5, causal=True),
    "alibi": Case(alibi=True, queries=45),
    "alibi, causal": Case(alibi=True, causal=True, queries=45, heads=(4, 2), sinks=True, lse_gradient=True),
    "sinks": Case(sinks=True, causal=True, queries=90, keys=60),
    "bias": Case(bias=WHOLE),
    "bias, one for all": Case(bias=(0, 0, 1, 1), heads=(4, 2)),
    "bias by key": Case(bias=(1, 0, 0, 1), causal=True),
    "bias by row": Case(bias=(0, 1, 1, 0), keys=40),
    "mask": Case(mask=WHOLE, heads=(4, 2)),
    "mask by key": Case(mask=(1, 0, 0, 1)),
    "mask, causal": Case(mask=(0, 0, 1, 1), causal=True),
    "packed": Case(packed=((30, 30), (0, 7), (17, 40), (5, 0), (1, 1)), causal=True),
    "packed, more": Case(packed=((30, 30), (0, 0), (17, 40)), heads=(4, 2), alibi=True, sinks=True, window=(9, 2)),
    "dropout": Case(dropout=0.3),
    "dropout, packed": Case(dropout=0.2, packed=((30, 30), (17, 40)), heads=(4, 2), causal=True),
    "dim 59": Case(dims=(59, 59), causal=True),
    "dim 111": Case(dims=(111, 111)),
    "dim 256": Case(dims=(256, 256), batch=1, heads=(2, 1)),
    "dims 24 and 40": Case(dims=(24, 40), causal=True),
    "lse gradient": Case(lse_gradient=True, causal=True, queries=80),
    "lse gradient, sinks": Case(lse_gradient=True, sinks=True, bias=(0, 1, 1, 1)),
    "one query": Case(queries=1, causal=True),
    "one key": Case(keys=1),
    "transposed": Case(transposed=True, bias=WHOLE),
    "strided": Case(strided=True, causal=True),
    "transposed, gqa": Case(transposed=True, heads=(4, 2), causal=True),
    "long": Case(batch=1, heads=(2, 1), queries=300, keys=700),
    "everything": Case(
        heads=(6, 3),
        queries=75,
        keys=90,
        causal=True,
        window=(40, None),
        softcap=3.0,
        alibi=True,
        sinks=True,
        bias=(1, 0, 1, 1),
        dropout=0.25,
        dims=(20, 28),
        lse_gradient=True,
    ),
}
