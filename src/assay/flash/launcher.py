"""A compiled kernel launched again: by Triton's launcher in C, without the Python in front of it.

That Python encodes every descriptor of the copy engine at every launch, and the launcher asks the driver about every
tensor's address. Here a descriptor is encoded once for each address, and addresses are given as numbers, of which
nothing is asked. What is reached for lies behind Triton's interface, so all of it is looked at first: where a Triton is
not built as 3.6 is, there is no launcher, and its kernels are launched as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.nvidia import driver
from triton.compiler import CompiledKernel

from assay.flash import descriptors

_BASE = "iiiKKppOOOOOO"
"""What the launcher takes before the kernel's arguments: grid, stream, function, two flags, scratch memory twice, the
kernel's numbers, and what hooks are told."""
_MOST = 1024
"""Addresses for which a descriptor is kept."""


class Launcher(NamedTuple):
    """Of one compiled kernel."""

    launch: Callable[..., None]
    rest: tuple[Any, ...]
    """What `launch` takes between the stream and the kernel's arguments."""
    encodings: list[dict[str, Any]]
    """How each of its descriptors is encoded, in the order of its arguments."""


def launcher_of(kernel: CompiledKernel) -> Launcher | None:
    """None where there is none to be had, or where the kernel wants memory of its own."""
    try:
        run, function = kernel.run, kernel.function
        launch, encodings = run.launch, list(kernel.metadata.tensordesc_meta or ())
        if not isinstance(launch, BuiltinFunctionType):  # the Python that encodes descriptors
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        wants = run.global_scratch_size or run.profile_scratch_size
        known = isinstance(launch, BuiltinFunctionType) and _BASE == driver._BASE_ARGS_FORMAT
        flags = run.launch_cooperative_grid, run.launch_pdl
        rest = (function, *flags, None, None, kernel.packed_metadata, None, None, None)
    except (AttributeError, KeyError, TypeError):
        return None
    return Launcher(launch, rest, encodings) if known and not wants and all(encodings) else None


def is_watched() -> bool:
    """Whether somebody has asked Triton to be told of every launch."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


class Encoded:
    """A descriptor of whatever tensor is at an address, encoded; `like` is one of the same shape, strides and dtype."""

    def __init__(self, like: Any, encoding: dict[str, Any]) -> None:
        self.like, self.encoding = like, encoding
        self.known: dict[int, Any] = {}

    def at(self, address: int) -> Any:
        """What the launcher takes for it, followed by its shape and strides."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _MOST:
                self.known.clear()
            found = self.known[address] = encode(descriptors.of(_Address(address), self.like), self.encoding)
        return found


def encode(descriptor: Any, encoding: dict[str, Any]) -> Any:
    """As Triton does."""
    return driver.make_tensordesc_arg(descriptor, encoding)[0]


class _Address(NamedTuple):
    """In place of a tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address
