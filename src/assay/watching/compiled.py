"""Compiled code: the watch cannot look into it, so it runs uncompiled as long, and a warning says what and why."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
from torch import nn

Function = Callable[..., Any]


class Uncompiled:
    """As long as `stack` is open, nothing runs compiled; what is found to be compiled is named once."""

    def __init__(self, model: nn.Module, also: Iterable[Function], stack: ExitStack) -> None:
        self._stack, self._warned, self._forced = stack.enter_context(ExitStack()), False, False
        if any(map(_is_compiled, model.modules())):
            self._warn("The model", stacklevel=4)
            self._stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
        else:
            name = next(_names(model, also), None)
            if name is not None:
                self._warn(name, stacklevel=4)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled yet, and importing it takes seconds
            self._force()

    def compiling(self, compile: Function) -> Function:
        """`torch.compile` that gives what runs uncompiled, too."""

        @functools.wraps(compile)
        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            found = compile(*args, **kwargs)
            if "torch._dynamo" in sys.modules:
                self._force()
            self._warn("What torch.compile was given")
            return found

        return uncompiled

    def look(self) -> None:
        """At who calls: it may be a compiled function that nothing else told of."""
        if not self._warned and "torch._dynamo" in sys.modules:
            frame = sys._getframe()
            while frame.f_back is not None:
                frame = frame.f_back
                code, file = frame.f_code, frame.f_globals.get("__name__")
                if code.co_name == "compile_wrapper" and file == "torch._dynamo.eval_frame":
                    function = frame.f_locals.get("fn")
                    self._warn(f"The function {getattr(function, '__qualname__', 'that calls attention')}")
                    return

    def _force(self) -> None:
        if not self._forced:
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._forced = True

    def _warn(self, what: str, stacklevel: int = 3) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{what} is compiled, and the watch cannot look into compiled code: it runs uncompiled while it is "
            "watched. Its bits may be others than those of the compiled code.",
            stacklevel=stacklevel,
        )


def _is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module), or by module.compile()."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _names(model: nn.Module, also: Iterable[Function]) -> Iterator[str]:
    """Of the compiled functions that were named, and of those that methods of the model's modules refer to."""
    for function in (*also, *_referred(model)):
        if hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False):
            yield f"The function {getattr(function, '__qualname__', repr(function))}"
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "flex_attention":
            yield "flex_attention, as transformers calls it,"


def _referred(model: nn.Module) -> Iterator[Any]:
    kinds: dict[type, None] = {}
    for module in model.modules():
        yield from vars(module).values()
        kinds |= dict.fromkeys(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch."))
    for kind in kinds:
        for value in list(vars(kind).values()):
            yield value
            if isinstance(value, FunctionType):
                yield from (value.__globals__.get(name) for name in value.__code__.co_names)
                yield from map(_content, value.__closure__ or ())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return None
