"""Functions of ours as operators of torch: one line that torch.compile keeps whole and autograd records.

`torch.library.custom_op` and `register_autograd` do the same, and then check every call for aliasing and look up
defaults that our operators do not have: each takes longer than launching a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_LIBRARY = torch.library.Library("assay", "FRAGMENT")


def operator(
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> Any:
    """`torch.ops.assay.<name of the function>`, on CPU and CUDA.

    Args:
        function: Takes and returns tensors (new ones) and plain values, with types.
        fake: The same for tensors without data: shapes, dtypes and strides of what would come.
        backward: The gradient, from (ctx, gradients of the results).
        setup: Keeps on ctx, from (ctx, inputs, output), what `backward` needs.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in _DEVICES:
        _LIBRARY.impl(name, function, device.name)
    torch.library.register_fake(f"assay::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        _LIBRARY.impl(
            name,
            _recorded(getattr(torch.ops.assay, name).default, function, backward, setup),
            "Autograd",
            with_keyset=True,
        )
    return getattr(torch.ops.assay, name).default


def _recorded(
    op: Any, function: Callable[..., Any], backward: Callable[..., Any], setup: Callable[..., None] | None
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What runs where autograd may record the call. All arguments are given by position, and none has a default."""

    def run(keys: Any, arguments: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            if (keys & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in _DEVICES:
                return function(*arguments)  # what the dispatcher would call, which takes longer to be asked
            return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    count = 1 + max(i for i, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type))

    class Recorded(torch.autograd.Function):
        """Torch looks at every argument several times: what comes after the last tensor is one."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *tensors, rest, keys = arguments
            given = (*tensors, *rest)
            result = run(keys, given)
            if setup is not None:
                setup(ctx, given, result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return *backward(ctx, *gradients)[:count], None, None

    def call(keys: Any, *arguments: Any) -> Any:
        if in_forward_mode():
            _refuse_tangents(op.name(), arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            if torch._C._are_functorch_transforms_active():
                raise NotImplementedError(
                    f"{op.name()} has no gradient within torch.func.grad, vjp and jacrev: give the inputs "
                    "requires_grad=True and call backward or torch.autograd.grad."
                )
            return Recorded.apply(*arguments[:count], arguments[count:], keys)
        return run(keys, arguments)

    return call


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents: within torch.func.jvp, jacfwd and forward_ad.dual_level."""
    return forward_ad._current_level >= 0


def _refuse_tangents(name: str, arguments: tuple[Any, ...]) -> None:
    """What runs below autograd drops tangents: the derivative would be 0 and nobody told."""
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(
            f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian; dual tensors), and an input "
            "carries a tangent: call backward or torch.autograd.grad, or compute attention in plain torch operations "
            "(softmax(q @ k.mT * scale) @ v)."
        )
