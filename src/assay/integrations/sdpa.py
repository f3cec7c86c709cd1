"""`with assay.use_for_sdpa():` whatever calls torch's attention gets ours. Nothing is patched: torch asks a mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from assay.flash.sdpa import scaled_dot_product_attention


def use_for_sdpa() -> AbstractContextManager[object]:
    """A context in which `torch.nn.functional.scaled_dot_product_attention` is ours, under whatever name it is called.

    So it is inside `nn.MultiheadAttention` and `nn.TransformerEncoder` too, which leave their fused evaluation path
    (with it the zeros at padded places); with `need_weights=True` they multiply matrices themselves, and go on so.
    Inputs that ours refuses go to torch's, with one warning for each reason.

    - It holds in the thread that opened it, and where that thread's backward runs. Other threads keep torch's.
    - With gradient checkpointing call `backward` inside: it computes attention again.
    - What torch.compile has compiled outside is compiled again inside, with ours, and neither is taken for the other.
      Two things warn there: what is checkpointed runs uncompiled, and `nn.TransformerEncoderLayer` keeps its fused
      evaluation path, and says how to turn that off.
    - TorchScript and the branches of `torch.cond` keep torch's. Dropout may draw other numbers than torch's.
    """
    return AttentionMode()


class AttentionMode(TorchFunctionMode):
    """What torch asks about each of its functions while the mode is on. It may be entered again, and anywhere."""

    calls: int = 0
    """Of torch's attention so far, but for those inside of what torch.compile compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """`func` of the arguments; ours if it is attention."""
        kwargs = kwargs or {}
        if func in _ATTENTION:
            return self._attend(func, types, args, kwargs)
        if func in _CALLERS and _plain(types):
            with self:  # torch turned it off for as long as we are asked
                return _CALLERS[func](*args, **kwargs)
        if func in _FUSED:
            self._warn(
                "the fused evaluation path of nn.TransformerEncoderLayer and nn.MultiheadAttention calls no attention "
                "that could be replaced. Turn it off with torch.backends.mha.set_fastpath_enabled(False)."
            )
        if func is checkpoint:  # a compiler asks, and would then compile what is checkpointed without asking
            self._warn("what is checkpointed runs uncompiled, since torch.compile would give it torch's attention.")
            torch._dynamo.graph_break(msg="torch.compile would give torch's attention to what is checkpointed.")
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            return torch.unflatten(*args, **kwargs)  # the method's own call is one that the compiler cannot follow
        return func(*args, **kwargs)

    def _attend(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            self.calls += 1
        refusal = _not_for_us(types, (*args, *kwargs.values()))
        if refusal is None:
            try:
                return scaled_dot_product_attention(*args, **kwargs)
            except ValueError as error:
                refusal = str(error)
        self._warn(f"these inputs go to torch's attention, because ours refuses them: {refusal}")
        return func(*args, **kwargs)

    def _warn(self, message: str) -> None:
        """Once; a compiler while it compiles the call."""
        if torch.compiler.is_compiling():
            _say(message)
        elif message not in self._said:
            self._said.add(message)
            _say(message)


def _plain(types: tuple[type, ...]) -> bool:
    return all(kind is Tensor or kind is Parameter for kind in types)


def _not_for_us(types: tuple[type, ...], arguments: tuple[Any, ...]) -> str | None:
    """Why ours is not even asked."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if any(x.is_nested for x in tensors):
        return "it takes plain tensors, got a nested one."
    if not _plain(types) or any(is_traceable_wrapper_subclass(x) for x in tensors):
        kinds = {type(x).__name__ for x in tensors} - {"Tensor", "Parameter"}
        return f"it takes plain tensors, got {', '.join(sorted(kinds))}."
    levels = None if torch.compiler.is_compiling() else torch._C._functorch.get_interpreter_stack()
    if any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels or ()):
        return "of torch.func's transforms it knows vmap alone."
    return None


def _say(message: str) -> None:
    warnings.warn(f"assay: {message}", stacklevel=5)


# As torch.compiler.assume_constant_result, which loads the compiler to say so: warn while compiling, do not compile it.
_say._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _never(*_: object) -> bool:
    return False


def _unasking(function: Any) -> Callable[..., Any]:
    """The same function, but it does not ask whether a mode wants it: it runs, and what it calls does ask."""
    asked = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = function.__globals__ | dict.fromkeys(asked, _never)
    same = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return same


# A tuple, since what replaces functions in modules while it runs (assay.watch) would replace the bare name here.
_ATTENTION = (functional.scaled_dot_product_attention,)
_FUSED = (torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention)
_CALLERS = {
    function: _unasking(function)
    for function in (
        functional.multi_head_attention_forward,
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    )
}
"""Functions of torch that stop at a mode themselves, and reach attention further in: checkpointing does in backward."""
