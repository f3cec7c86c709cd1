"""Functions of ours as operators of torch: one line that torch.compile keeps whole and autograd records.

`torch.library.custom_op` and `register_autograd` do the same, and then check every call for aliasing and look up
defaults that our operators do not have: each takes longer than launching a kernel. So does torch's dispatcher, which is
left out where nobody but autograd and the device's own function has anything to do with a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad, profiler
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_ANY = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_USUAL = frozenset(keys.raw_repr() for keys in (_ANY, _ANY.add(torch._C.DispatchKey.ADInplaceOrView)))
"""What a thread adds to the keys of tensors, in inference mode and else: any mode or transform adds more."""
_LIBRARY = torch.library.Library("assay", "FRAGMENT")
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_Function = Callable[..., Any]


def operator(
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> Any:
    """Makes `torch.ops.assay.<name of the function>`, on CPU and CUDA; to be called by what is returned.

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
    op = getattr(torch.ops.assay, name).default
    recorded = None
    if backward is not None:
        recorded = _recorded(op, function, backward, setup)
        _LIBRARY.impl(name, _dispatched(op, recorded), "Autograd", with_keyset=True)
    return _called(op, function, recorded)


def _called(op: Any, function: _Function, recorded: Any) -> _Function:
    """`op`, or, where the dispatcher would only pass a call on, what it comes to."""
    count = _tensors_of(op)

    def call(*arguments: Any) -> Any:
        tensors = arguments[:count]
        if not is_passed_on(tensors):
            return op(*arguments)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)) or _is_below_autograd():
            return function(*arguments)
        return op(*arguments) if recorded is None else recorded.apply(*tensors, arguments[count:], None)

    return call


def is_passed_on(arguments: tuple[Any, ...]) -> bool:
    """Whether all that the dispatcher sees are tensors of a device, as torch makes them, and autograd.

    No compiler, mode, transform or tracer, no subclass, no tensor without numbers or that is to be negated when it is
    read. Profilers want to see operators under their names.
    """
    if is_compiling() or has_torch_function(arguments) or in_forward_mode():
        return False
    if torch._C._autograd._profiler_enabled() or profiler._is_profiler_enabled:  # in this thread; in any
        return False
    if torch._C._dispatch_tls_local_include_set().raw_repr() not in _USUAL:
        return False
    return all(_is_usual(x) for x in arguments if isinstance(x, torch.Tensor))


def _is_usual(x: torch.Tensor) -> bool:
    if type(x) not in _TENSORS or not (x.is_cuda or x.is_cpu) or x.layout is not torch.strided or x.is_nested:
        return False
    return not (x.is_neg() or x._is_zerotensor())


def _is_below_autograd() -> bool:
    """Within an operator of torch's, which has a gradient of its own, and in inference mode."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def _tensors_of(op: Any) -> int:
    """How many arguments there are up to the last tensor."""
    return 1 + max(i for i, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type))


def _below_autograd(op: Any, keys: Any, arguments: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def _recorded(op: Any, function: _Function, backward: _Function, setup: Callable[..., None] | None) -> Any:
    """What autograd records. All arguments are given by position, and none has a default."""
    count = _tensors_of(op)

    class Recorded(torch.autograd.Function):
        """Torch looks at every argument several times: what comes after the last tensor is one.

        The very last are the dispatcher's keys, or None where it is left out.
        """

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *tensors, rest, keys = arguments
            given = (*tensors, *rest)
            result = function(*given) if keys is None else _below_autograd(op, keys, given)
            if setup is not None:
                setup(ctx, given, result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return *backward(ctx, *gradients)[:count], None, None

    return Recorded


def _dispatched(op: Any, recorded: Any) -> _Function:
    """What the dispatcher calls where autograd may record the call."""
    count = _tensors_of(op)

    def call(keys: Any, *arguments: Any) -> Any:
        if in_forward_mode():
            _refuse_tangents(op.name(), arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            if torch._C._are_functorch_transforms_active():
                raise NotImplementedError(
                    f"{op.name()} has no gradient within torch.func.grad, vjp and jacrev: give the inputs "
                    "requires_grad=True and call backward or torch.autograd.grad."
                )
            return recorded.apply(*arguments[:count], arguments[count:], keys)
        return _below_autograd(op, keys, arguments)

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
