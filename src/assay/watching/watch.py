"""`watch`: while a model runs, each attention call is also computed by another implementation, and compared."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from assay.results.record import Record
from assay.watching.adapters import Adapter, Arguments, FunctionAdapter
from assay.watching.catching import Replaced
from assay.watching.compiled import Uncompiled
from assay.watching.gradients import Gradients, own_views
from assay.watching.ledger import Ledger
from assay.watching.others import OTHERS, Call
from assay.watching.registered import tables
from assay.watching.rows import Seen
from assay.watching.running import OUTSIDE, Running
from assay.watching.summary import summary
from assay.watching.targets import targets
from assay.watching.two_steps import SCORES, TwoSteps, owners
from assay.watching.worst import Worst

Function = Callable[..., Any]
_active = threading.Lock()
KNOWN = (
    "F.scaled_dot_product_attention, transformers' attention (eager or registered), diffusers' processors, flash-attn "
    "or assay.flash_attention"
)
"""What is found by itself, for people."""


def watch(
    model: nn.Module,
    *,
    against: str = "baseline",
    golden: bool = True,
    every: int | float = 1,
    also: Mapping[Function, Function] | None = None,
    out: Path | str | None = None,
) -> Watch:
    """Compare every attention call of `model`, as long as the `with` lasts, with the same computed plainly.

        with assay.watch(model, out="runs/watch") as w:
            loss = model(batch).loss
            loss.backward()
        print(w.summary())

    The model goes on with what it computed itself, bit for bit as if not watched. Calls of
    `F.scaled_dot_product_attention` (as nn.MultiheadAttention and most models make them), of transformers' eager
    attention and of what is registered with its AttentionInterface, of diffusers' processors, of flash-attn and of ours
    are found wherever they are made; in training the gradients of q, k and v are compared as well. torch's layers that
    are one fused operation, as in inference, are compared as a whole. What is compiled, the model or a function that it
    calls, runs uncompiled as long, and a warning says so.

    Args:
        model: Any module. Names of its submodules are the layers.
        against: "baseline" (matmul, softmax, matmul in the format of the call) or "flash" (`assay.flash_attention`).
        golden: Also compute in FP64, and judge the call's error (RMSE) by the other's: more than 2 times as much (3
            for gradients), or a NaN in the wrong place, is over budget. The ratio of the largest errors is shown too.
        every: A layer is compared in one step of so many, and layers take turns; or the share of calls, 0.01. Of a
            large call some sequences are then compared, or some heads of a long one (2²⁵ scores, on a CPU 2²¹), which
            take turns, too.
        also: Other functions and modules to watch: fast → plain, of the same signature. Golden is the plain one in
            FP64.
        out: A folder for the rows, which `assay report` draws.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be a torch.nn.Module, got {type(model).__name__}.")
    if against not in OTHERS:
        raise ValueError(f"against must be one of {', '.join(OTHERS)}, got {against!r}.")
    if not 0 < every < 1 and not (math.isfinite(every) and every >= 1 and every == int(every)):
        raise ValueError(f"every must be a whole number of steps (100) or a share of the calls (0.01), got {every}.")
    share = every if every < 1 else 1 / every
    return Watch(model, against, golden, share, dict(also or {}), None if out is None else Path(out))


class Watch:
    """What was seen; see `watch`."""

    def __init__(
        self,
        model: nn.Module,
        against: str,
        golden: bool,
        share: float,
        also: dict[Function, Function],
        folder: Path | None,
    ) -> None:
        self._model, self._share, self._also, self._golden = model, share, also, golden
        self._ledger: Ledger | None = None
        self._running: Running | None = None
        self._uncompiled: Uncompiled
        self._open = ExitStack()
        self._busy = threading.local()
        self._layers: dict[str, int] = {}
        self._found = 0
        self.skipped: Counter[str] = Counter()
        """Why calls were not compared: reason → how many."""
        self._make = functools.partial(
            Ledger, type(model).__name__, against, OTHERS[against], golden, folder, self.skipped, share < 1
        )

    @property
    def rows(self) -> deque[Record]:
        """The last rows: one for each head of each tensor of each call, and one for all heads (head None)."""
        return self._settled().rows

    @property
    def calls(self) -> int:
        """How many calls were compared."""
        return self._settled().calls

    @property
    def first_over(self) -> Record | None:
        """The first row that is over budget: of a whole call or, where that is within it, of its worst head."""
        return self._settled().first_over

    @property
    def first_nonfinite(self) -> Record | None:
        """The first row of a whole call with NaN or infinities, also where golden has them."""
        return self._settled().first_nonfinite

    @property
    def worst(self) -> Worst:
        """The call, or head, with the largest error over the other's; `worst.save(path)` keeps the call's inputs."""
        return self._settled().worst

    @property
    def found(self) -> int:
        """How many calls were seen, compared or not."""
        return self._found

    def begin_step(self, step: int) -> None:
        """For loops that know their steps: what follows is step `step`, however often the model runs in it."""
        self._followed().begin(step)

    def end_step(self) -> None:
        """What follows is of no step: it is not compared until the next one begins."""
        self._followed().between = True

    def summary(self) -> str:
        """A table of the layers, and what stands out."""
        return summary(self.rows, self.skipped, self.first_over, self.first_nonfinite)

    def __enter__(self) -> Watch:
        if not _active.acquire(blocking=False):
            raise ValueError("A model is being watched already: watches do not nest. Leave the other `with` first.")
        with ExitStack() as stack:
            stack.callback(_active.release)
            self._ledger = self._make()
            stack.callback(self._ledger.close)
            stack.callback(self._settled)
            self._uncompiled = Uncompiled(self._model, self._also, stack)
            self._running = Running(self._model, self._settled)
            stack.callback(self._running.close)
            self._catch(stack)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        steps = self._running.steps if self._running is not None else 0
        if kind is None and steps and not set(self._layers) - {OUTSIDE}:
            raise ValueError(
                f"No attention was found in {type(self._model).__name__}: it ran {steps} times and called none of "
                f"{KNOWN}. Name others with also={{fast: plain}}."
            )

    def close(self) -> None:
        """Watch no more: what leaving the `with` does, whether or not there was any attention."""
        if self._running is not None:
            self._running.between = True  # for whoever has kept one of our functions
        self._open.close()

    def _entered(self) -> Ledger:
        if self._ledger is None:
            raise ValueError("Nothing was watched yet: use it as `with assay.watch(model) as w:`.")
        return self._ledger

    def _settled(self) -> Ledger:
        """With all calls compared, also those whose gradients have not come."""
        ledger = self._entered()
        with self._looking_away():
            ledger.settle()
        return ledger

    def _followed(self) -> Running:
        self._entered()
        assert self._running is not None
        return self._running

    def _catch(self, stack: ExitStack) -> None:
        replaced = Replaced(self._model, tables(self._model))
        stack.callback(replaced.restore)
        replaced.replace_in(torch, "compile", self._uncompiled.compiling(torch.compile))
        others = {
            function: self._wrapped(replaced.genuine(function), adapter) for function, adapter in targets(self._model)
        }
        kinds = list(owners(self._model))
        if kinds:
            steps = TwoSteps(self._away, lambda: self._followed().layer, self._see, self._lost)
            stack.callback(steps.close)
            for kind in kinds:
                replaced.replace_in(kind, SCORES, steps.first(vars(kind)[SCORES]))
            others[torch.bmm] = steps.second(replaced.genuine(torch.bmm))
        for fast, plain in self._also.items():
            beside = FunctionAdapter(name=_name(fast), plain=plain)
            if isinstance(fast, nn.Module):
                replaced.replace_in(fast, "forward", self._wrapped(fast.forward, beside))
            else:
                others[fast] = self._wrapped(replaced.genuine(fast), beside)
        found = replaced.replace(others)
        missing = [_name(fast) for fast in self._also if not isinstance(fast, nn.Module) and fast not in found]
        if missing:
            raise ValueError(f"No loaded module has the function {missing[0]}, so its calls cannot be found.")

    def _wrapped(self, function: Function, adapter: Adapter | FunctionAdapter) -> Function:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._away():
                return function(*args, **kwargs)
            arguments = adapter.bound(args, kwargs)
            return self._see(function, adapter, arguments) if adapter.applies(arguments) else function(*args, **kwargs)

        return watched

    def _away(self) -> bool:
        """What a caught function calls in turn is part of it; and what is being compiled cannot be looked into."""
        away = getattr(self._busy, "now", False) or self._followed().between
        return away or torch.compiler.is_compiling()

    def _see(self, function: Function, adapter: Adapter | FunctionAdapter, arguments: Arguments) -> Any:
        with self._looking_away():
            return self._call(function, adapter, arguments)

    def _lost(self, layer: str) -> None:
        self._found += 1
        self._layers.setdefault(layer, len(self._layers))
        self.skipped["probabilities that torch.bmm was not given as they were"] += 1

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        """What is called now is our own doing, or part of what was caught."""
        before, self._busy.now = getattr(self._busy, "now", False), True
        try:
            yield
        finally:
            self._busy.now = before

    def _understood(self, adapter: Adapter | FunctionAdapter, arguments: Arguments) -> Call | str:
        """What is computed; or why that cannot be compared."""
        if _transforms():
            return "a transform of torch.func"
        try:
            call = adapter.call(arguments)
        except Exception as error:  # if they are wrong, the function itself says so better
            return f"arguments that the watch does not understand ({type(error).__name__}: {error})"
        return call if isinstance(call, str) else self._why_not(call) or call

    def _why_not(self, call: Call) -> str | None:
        if any(x.numel() == 0 for x in call.tensors().values()):
            return "an empty tensor"
        if self._golden and call.dtype == torch.float64:
            return "FP64: golden is no better"
        return None

    def _call(self, function: Function, adapter: Adapter | FunctionAdapter, arguments: Arguments) -> Any:
        assert self._running is not None
        layer, step, number = self._running.place()
        self._found += 1
        if layer not in self._layers:
            self._uncompiled.look()
        turn = step + self._layers.setdefault(layer, len(self._layers))
        if turn and math.floor(turn * self._share) == math.floor((turn - 1) * self._share):
            return adapter.invoke(function, arguments)
        call = self._understood(adapter, arguments)
        if isinstance(call, str):
            self.skipped[call] += 1
            return adapter.invoke(function, arguments)
        seen = Seen(layer=layer, step=step, call=number, implementation=adapter.named(arguments))
        names = adapter.differentiated(arguments)
        views = own_views(adapter, arguments, names) if torch.is_grad_enabled() else {}
        result = adapter.invoke(function, arguments | views)
        out, ledger = adapter.output(result), self._entered()
        if out is None or not call.gives(adapter.seen_output(out)):
            self.skipped["a result that is no tensor" if out is None else "an output of an unexpected shape"] += 1
            return result
        waits = bool(views) and out.requires_grad
        one = ledger.output(seen, call, adapter.seen_output(out), waits)
        if waits:

            def told(grad: Tensor, found: dict[str, Tensor]) -> None:
                with self._looking_away():
                    ledger.gradients(one, grad, found)

            Gradients(adapter, out, views, told)
        return result


def _transforms() -> bool:
    """Whether vmap, grad or another of torch.func's is at work: their tensors cannot be looked into."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _name(function: Function) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
