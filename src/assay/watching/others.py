"""What a call can be compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from assay.watching.call import AttentionCall
from assay.watching.function_call import FunctionCall
from assay.watching.packed_call import PackedCall

Call = AttentionCall | PackedCall | FunctionCall
Comparison = Callable[[Call, Tensor | None], Sequence[Tensor]]
"""Another implementation: the output and, given its gradient, those of the inputs."""


def _plain(call: Call, grad: Tensor | None) -> Sequence[Tensor]:
    return call.plain(grad)


def _flash(call: Call, grad: Tensor | None) -> Sequence[Tensor]:
    if isinstance(call, PackedCall):
        return call.each(grad, _flash)
    if not isinstance(call, AttentionCall):  # a function of the user's: only its plain one is known
        return call.plain(grad)
    from assay.flash.attention import flash_attention

    with torch.set_grad_enabled(grad is not None):
        q, k, v = (x.detach().requires_grad_(grad is not None) for x in (call.q, call.k, call.v))
        out = flash_attention(
            q, k, v, scale=call.scale, window=(call.left, call.right), softcap=call.softcap,
            alibi_slopes=call.slopes, sinks=call.sinks, bias=call.bias,
        )  # fmt: skip
    if grad is None:
        return (out,)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))


def replayed(call: Call, actual: Tensor, other: Tensor, golden: Tensor | None) -> AttentionCall | FunctionCall:
    """What is kept of a call to be made again: of several sequences the worst; given its outputs."""
    return call.worst(actual, other, golden) if isinstance(call, PackedCall) else call


OTHERS: dict[str, Comparison] = {"baseline": _plain, "flash": _flash}
"""By name."""
