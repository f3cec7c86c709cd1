"""Calls on CPU tensors that go where those on an H200 would, and what Triton is asked to launch for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from assay.flash import descriptors, gpu, hopper, hopper_forward, launcher, replay
from tests.flash.machine_code import _Offline

ZERO = torch.zeros(4, dtype=torch.int32)


class Asked:
    """What Triton was asked to launch. Tensors have the numbers in which their addresses came."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.tensors: list[torch.Tensor | There] = []
        self.again = 0
        self.encoded = True
        """Whether descriptors are: GPUs before Hopper take them as addresses and numbers."""

    def add(self, kernel: Any, grid: tuple[int, ...], bound: Any, options: dict[str, Any]) -> None:
        arguments = [self._named(x) for x in bound]
        self.launches.append((kernel.fn.__name__, (*grid, 1, 1)[:3], arguments, options))

    def _named(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor | There):
            same = [i for i, known in enumerate(self.tensors) if known.data_ptr() == x.data_ptr()]
            if not same:
                self.tensors.append(x)
            return same[0] if same else len(self.tensors) - 1, x.dtype
        if isinstance(x, descriptors.KINDS):
            return type(x), self._named(x.base), x.shape, x.strides, x.block_shape, getattr(x, "layout", None)
        return tuple(map(self._named, x)) if isinstance(x, tuple) else (type(x), repr(x))


@dataclass
class There:
    """What is at an address."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Compiled(CompiledKernel):  # type: ignore[misc]
    """For what Triton would have compiled it for, with what it was given first."""

    def __init__(
        self, kernel: Any, specialization: Any, options: dict[str, Any], given: list[Any], asked: Asked
    ) -> None:
        self.kernel, self.specialization, self.options, self.asked = kernel, specialization, options, asked
        self.module = None  # nothing to unload
        self.dtypes = [dtypes_of(x) for x in given]

    def launcher(self) -> launcher.Launcher:
        encodings = [x for x in self.dtypes if isinstance(x, dict)] if self.asked.encoded else []
        return launcher.Launcher(self.launch, ("function", *range(8)), encodings)

    def launch(self, *taken: Any) -> None:
        """What the launcher in C takes; of descriptors, `encode` below."""
        x, y, z, stream, function = taken[:5]
        assert (stream, function, taken[5:13]) == (7, "function", tuple(range(8)))
        rest, arguments = list(taken[13:]), []
        for dtypes in self.dtypes:
            value = rest.pop(0)
            if not isinstance(dtypes, dict):
                arguments.append(there(value, dtypes))
                continue
            made = value if self.asked.encoded else descriptors.of(There(value, dtypes["base"]), dtypes["like"])
            numbers = [*made.shape, *made.strides]
            # TF32: from Triton 3.7 on
            how = [made.padding == "nan", *([made.round_f32_to_tf32] if hasattr(made, "round_f32_to_tf32") else [])]
            expected = numbers if self.asked.encoded else [*numbers, *how, *numbers]
            assert [rest.pop(0) for _ in expected] == expected
            arguments.append(made)
        assert rest == []
        bound, specialization, _ = self.kernel.device_caches[0][4](*arguments)
        assert specialization == self.specialization
        self.asked.again += 1
        self.asked.add(self.kernel, (x, y, z), bound.values(), self.options)


def dtypes_of(value: Any) -> Any:
    """Of tensors, wherever they are in an argument; of a descriptor's, with its name."""
    if isinstance(value, descriptors.KINDS):
        return {"base": value.base.dtype, "like": descriptors.bare(value)}
    if isinstance(value, tuple):
        return tuple(map(dtypes_of, value))
    return value.dtype if isinstance(value, torch.Tensor) else None


def there(value: Any, dtypes: Any) -> Any:
    """An argument with what is at its addresses."""
    if isinstance(value, tuple):
        return tuple(map(there, value, dtypes))
    return value if dtypes is None else There(value, dtypes)


def encode(descriptor: Any, encoding: dict[str, Any]) -> Any:
    return descriptors.of(There(descriptor.base.data_ptr(), encoding["base"]), descriptor)


class Held(list[Any]):
    """What may not have its address taken by another tensor."""

    def __call__(self, x: Any) -> Any:
        self.append(x)
        return x


held = Held()


def other(x: Any) -> Any:
    """A tensor of the same form, elsewhere."""
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


@contextmanager
def asking() -> Iterator[Asked]:
    """Calls on CPU tensors go where those on an H200's would; nothing is compiled."""
    found = Asked()

    def ask(self: Any, grid: Any) -> Any:
        def run(*args: Any, **named: Any) -> Compiled:
            bound, specialization, options = self.device_caches[0][4](*args, **named)
            found.add(self, grid, bound.values(), options)
            return Compiled(self, specialization, options, list(bound.values()), found)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", ask)
        patch.setattr(driver, "_active", _Offline())
        patch.setattr(hopper, "can", lambda call: max(call.q.shape[3], call.v.shape[3]) in hopper.DIMS)
        patch.setattr(gpu, "processors", lambda index: 132)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for module in (hopper, hopper_forward, replay):
            patch.setattr(module, "counter", lambda device: ZERO)
        patch.setattr(replay, "can", lambda x: True)
        patch.setattr(replay, "_stream", lambda device: 7)
        patch.setattr(launcher, "launcher_of", lambda kernel: kernel.launcher())
        patch.setattr(launcher, "encode", encode)
        made = replay._made
        patch.setattr(replay, "_made", lambda *of: held(made(*of)))
        held.clear()
        replay.forget()
        yield found
    replay.forget()
