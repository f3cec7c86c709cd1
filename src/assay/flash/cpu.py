"""Attention on the CPU: PyTorch's kernel where it can do the call, else our own blocks. Runs below autograd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from assay.flash import cpu_aten, cpu_tiled
from assay.flash.call import Call, Gradients
from assay.flash.cpu_tiles import accumulator
from assay.flash.layout import empty_gradient, empty_output


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, H, queries, D_v) in q's dtype, and the LSE (B, H, queries) in FP32 (FP64 for FP64).

    They lie in memory as `empty_output` does; the LSE is contiguous.
    """
    with torch.no_grad():
        if not call.packed:
            return _forward(call, 0)
        q = call.q
        out = empty_output(q, call.v.shape[-1]).zero_()
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulator(q.dtype))
        for number, sequence, rows, _ in _sequences(call):
            out[:, :, rows], lse[:, :, rows] = _forward(sequence, number)
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
        grads = (
            _packed(call, out, lse, dout, dlse) if call.packed else _backward(call, out, lse, dout, dlse, needs_bias)
        )
        if call.sinks is None or grads.sinks is None:
            return grads
        return grads._replace(sinks=grads.sinks.to(call.sinks.dtype))


def _forward(call: Call, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    if cpu_aten.takes(call):
        return cpu_aten.forward(call)
    with torch.autocast("cpu", enabled=False):  # which would make bf16 of FP32 products
        return cpu_tiled.forward(call, number)


def _backward(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    needs_bias: bool,
    number: int = 0,
) -> Gradients:
    if dlse is None and not needs_bias and cpu_aten.takes(call):
        return cpu_aten.backward(call, out, lse, dout)
    with torch.autocast("cpu", enabled=False):
        return cpu_tiled.backward(call, out, lse, dout, dlse, needs_bias=needs_bias, first_batch=number)


def _packed(
    call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    dq, dk, dv = (empty_gradient(x).zero_() for x in (call.q, call.k, call.v))
    dsinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=accumulator(call.q.dtype))
    for number, sequence, rows, keys in _sequences(call):
        of_lse = None if dlse is None else dlse[:, :, rows]
        of_rows = out[:, :, rows], lse[:, :, rows], dout[:, :, rows]
        grads = _backward(sequence, *of_rows, of_lse, False, number)
        dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = grads[:3]
        if dsinks is not None and grads.sinks is not None:
            dsinks += grads.sinks
    return Gradients(dq, dk, dv, None, dsinks)


def _sequences(call: Call) -> Iterator[tuple[int, Call, slice, slice]]:
    """Each packed sequence by itself: its number, its call, its rows and its keys."""
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    assert call.bias is None  # has no place for sequences
    cuts = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_k.tolist()), strict=True)
    for number, (of_q, of_k) in enumerate(cuts):
        rows, keys, slopes = slice(*of_q), slice(*of_k), call.slopes
        if slopes is not None and slopes.shape[0] > 1:
            slopes = slopes[number : number + 1]
        q, k, v = call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys]
        yield number, replace(call, q=q, k=k, v=v, slopes=slopes, cu_seqlens_q=None, cu_seqlens_k=None), rows, keys
