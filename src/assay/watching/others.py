"""What a call can be compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from assay.watching.call import AttentionCall
from assay.watching.function_call import FunctionCall
from assay.watching.packed_call import PackedCall

Call = AttentionCall | PackedCall | FunctionCall


class Comparison(NamedTuple):
    """Another implementation."""

    output: Callable[[Call], Tensor]
    gradients: Callable[[Call, Tensor], Sequence[Tensor]]


def _flash(call: Call) -> Tensor:
    if isinstance(call, PackedCall):
        return call.together(_flash)
    if not isinstance(call, AttentionCall):  # a function of the user's: only its plain one is known
        return call.plain()
    from assay.flash.attention import flash_attention

    return flash_attention(
        call.q, call.k, call.v, scale=call.scale, window=(call.left, call.right), softcap=call.softcap,
        alibi_slopes=call.slopes, sinks=call.sinks, bias=call.bias,
    )  # fmt: skip


def _flash_gradients(call: Call, grad: Tensor) -> Sequence[Tensor]:
    if isinstance(call, PackedCall):
        return call.gradients(grad, _flash_gradients)
    if not isinstance(call, AttentionCall):
        return call.plain_gradients(grad)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
        out = _flash(replace(call, q=q, k=k, v=v))
    return torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))


OTHERS = {
    "baseline": Comparison(lambda call: call.plain(), lambda call, grad: call.plain_gradients(grad)),
    "flash": Comparison(_flash, _flash_gradients),
}
"""By name."""
