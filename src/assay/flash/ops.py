"""The operators that torch sees: forward and backward, their shapes, their gradients.

They are what torch.compile keeps whole, what autograd records, and where a device's code is chosen.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from assay.flash.call import Call, Gradients
from assay.flash.checks import check_boundaries
from assay.flash.layout import empty_gradient, empty_output
from assay.flash.library import operator
from assay.flash.numerics import Numerics

_Saved = tuple[Tensor | None, ...]


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout: float,
    deterministic: bool,
    batch_invariant: bool,
    tf32: bool,
    numerics: str,
) -> tuple[Tensor, Tensor]:
    """Output and LSE. The arguments are those of a `Call`."""
    tensors = (q, k, v, bias, slopes, sinks, cu_seqlens_q, cu_seqlens_k, seed)
    call = _call(tensors, (scale, left, right, softcap, dropout, deterministic, batch_invariant, tf32, numerics))
    with _device_of(q):
        out, lse = _backend(q.is_cuda).forward(call)
    return out, lse


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


def flash_backward(
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs_bias: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout: float,
    deterministic: bool,
    batch_invariant: bool,
    tf32: bool,
    numerics: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, bias and sinks; empty for the last two where there is none."""
    tensors = (q, k, v, bias, slopes, sinks, cu_seqlens_q, cu_seqlens_k, seed)
    call = _call(tensors, (scale, left, right, softcap, dropout, deterministic, batch_invariant, tf32, numerics))
    with _device_of(q):
        grads: Gradients = _backend(q.is_cuda).backward(call, out, lse, dout, dlse, needs_bias=needs_bias)
    dbias, dsinks = (q.new_empty(0) if x is None else x for x in grads[3:])
    return grads.q, grads.k, grads.v, dbias, dsinks


def _backward_fake(
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs_bias: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dbias = q.new_empty(0) if bias is None or not needs_bias else bias.new_empty(bias.shape)
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return empty_gradient(q), empty_gradient(k), empty_gradient(v), dbias, dsinks


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    bias, sinks = tensors[3], tensors[5]
    if dout is None:
        dout = torch.zeros_like(out)
    needs_bias = bias is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dbias, dsinks = attention_gradients(out, lse, dout, dlse, needs_bias, *tensors, *ctx.options)
    given = (dq, dk, dv, dbias if needs_bias else None, None, None if sinks is None else dsinks)
    return *given, *(None for _ in range(12))


def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "flash_attention has no second derivative: call backward without create_graph=True, or compute attention in "
        "plain torch operations (softmax(q @ k.mT * scale) @ v) where you need one."
    )


attention = operator(flash_forward, fake=_forward_fake, backward=_gradients, setup=_setup)
attention_gradients = operator(flash_backward, fake=_backward_fake, backward=_refuse)


def _call(tensors: _Saved, options: tuple[Any, ...]) -> Call:
    q, k, v, bias, slopes, sinks, cu_q, cu_k, seed = tensors
    scale, left, right, softcap, dropout, deterministic, batch_invariant, tf32, numerics = options
    assert q is not None
    assert k is not None
    assert v is not None
    if cu_q is not None and cu_k is not None:
        check_boundaries("cu_seqlens_q", cu_q, q.shape[2])
        check_boundaries("cu_seqlens_k", cu_k, k.shape[2])
    # The kernels read these one after the other in memory.
    slopes, sinks, cu_q, cu_k = (None if x is None else x.contiguous() for x in (slopes, sinks, cu_q, cu_k))
    return Call(
        q=q, k=k, v=v, bias=bias, slopes=slopes, sinks=sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seed=seed,
        scale=scale, left=left, right=right, softcap=softcap, dropout=dropout, deterministic=deterministic,
        batch_invariant=batch_invariant, tf32=tf32, numerics=Numerics.decoded(numerics),
    )  # fmt: skip


@cache
def _backend(cuda: bool) -> Any:
    """The module whose `forward` and `backward` run on the device."""
    return import_module("assay.flash.launch" if cuda else "assay.flash.cpu")


def _device_of(q: Tensor) -> Any:
    """Triton launches on the current device, whatever its arguments say."""
    return torch.cuda.device(q.device.index) if q.is_cuda else nullcontext()


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
