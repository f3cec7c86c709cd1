"""Attention on the CPU: PyTorch's kernel where it can do the call, else our own blocks. Runs below autograd.

Packed sequences are computed one after the other; so are the members of a batch that must not change each other's bits.
For matrix products sum up in an order that depends on how many there are, on the threads they meet and on where numbers
lie in memory: so those members are also copied, each into memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from assay.flash import cpu_aten, cpu_tiled
from assay.flash.call import Call, Gradients
from assay.flash.cpu_tiles import accumulator
from assay.flash.layout import empty_gradient, empty_output

_Index = tuple[slice, ...]


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, H, queries, D_v) in q's dtype, and the LSE (B, H, queries) in FP32 (FP64 for FP64).

    They lie in memory as `empty_output` does; the LSE is contiguous.
    """
    with torch.no_grad():
        if not (call.packed or call.batch_invariant):
            return _forward(call, 0)
        q = call.q
        out = empty_output(q, call.v.shape[-1]).zero_()
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulator(q.dtype))
        for number, part, rows, _ in _parts(call):
            out[rows], lse[rows] = _forward(part, number)
        return out, lse


def backward(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    needs_bias: bool = False,
) -> Gradients:
    """The gradients, given those of the output and of the LSE (None: it has none).

    The bias's only if `needs_bias`; that of the sinks whenever there are sinks. Those of q, k and v lie in memory as
    `empty_gradient` does.
    """
    with torch.no_grad():
        by_parts = call.packed or call.batch_invariant
        grads = (_backward_by_parts if by_parts else _backward)(call, _Passed(out, lse, dout, dlse), needs_bias)
        if call.sinks is None or grads.sinks is None:
            return grads
        return grads._replace(sinks=grads.sinks.to(call.sinks.dtype))


def _forward(call: Call, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    if cpu_aten.takes(call):
        return cpu_aten.forward(call)
    with torch.autocast("cpu", enabled=False):  # which would make bf16 of FP32 products
        return cpu_tiled.forward(call, number)


class _Passed(NamedTuple):
    """What the forward pass made, and the gradients of it."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


def _backward(call: Call, passed: _Passed, needs_bias: bool, number: int = 0) -> Gradients:
    if passed.dlse is None and not needs_bias and cpu_aten.takes(call):
        return cpu_aten.backward(call, passed.out, passed.lse, passed.dout)
    with torch.autocast("cpu", enabled=False):
        return cpu_tiled.backward(call, *passed, needs_bias=needs_bias, first_batch=number)


def _backward_by_parts(call: Call, passed: _Passed, needs_bias: bool) -> Gradients:
    dtype = accumulator(call.q.dtype)
    dq, dk, dv = (empty_gradient(x).zero_() for x in (call.q, call.k, call.v))
    dsinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=dtype)
    dbias = None if call.bias is None or not needs_bias else torch.zeros_like(call.bias, dtype=dtype)
    for number, part, rows, keys in _parts(call):
        out, lse, dout = (_own(call, x[rows]) for x in passed[:3])
        dlse = None if passed.dlse is None else _own(call, passed.dlse[rows])
        grads = _backward(part, _Passed(out, lse, dout, dlse), needs_bias, number)
        dq[rows], dk[keys], dv[keys] = grads[:3]
        if dsinks is not None and grads.sinks is not None:
            dsinks += grads.sinks
        if dbias is not None and grads.bias is not None:
            dbias[_member(dbias, number)] += grads.bias
    return Gradients(dq, dk, dv, None if dbias is None or call.bias is None else dbias.to(call.bias.dtype), dsinks)


def _parts(call: Call) -> Iterator[tuple[int, Call, _Index, _Index]]:
    """Each packed sequence or member of the batch by itself: its number, its call, and where its rows and keys are."""
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    every = slice(None)
    indices: list[tuple[_Index, _Index]]
    if cu_q is None or cu_k is None:
        indices = [((slice(b, b + 1),), (slice(b, b + 1),)) for b in range(call.q.shape[0])]
    else:
        assert call.bias is None  # has no place for sequences
        cuts = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
        indices = [((every, every, slice(*of_q)), (every, every, slice(*of_k))) for of_q, of_k in cuts]
    for number, (rows, keys) in enumerate(indices):
        q, k, v = _own(call, call.q[rows]), _own(call, call.k[keys]), _own(call, call.v[keys])
        bias, slopes = (None if x is None else _own(call, x[_member(x, number)]) for x in (call.bias, call.slopes))
        part = replace(call, q=q, k=k, v=v, bias=bias, slopes=slopes, cu_seqlens_q=None, cu_seqlens_k=None)
        yield number, part, rows, keys


def _member(x: torch.Tensor, number: int) -> slice:
    """Of a tensor whose first dimension is 1 for all, or one for each."""
    return slice(number, number + 1) if x.shape[0] > 1 else slice(0, 1)


def _own(call: Call, x: torch.Tensor) -> torch.Tensor:
    """x; where bits must not depend on where it lies, a copy."""
    return x.clone(memory_format=torch.contiguous_format) if call.batch_invariant else x
