"""A compiled kernel launched again: by Triton's launcher in C, without the Python in front of it.

That Python encodes every descriptor of the copy engine at every launch, and the launcher asks the driver about every
tensor's address. Here a descriptor is encoded once for each address, and addresses are given as numbers, of which
nothing is asked. What is reached for lies behind Triton's interface, so all of it is looked at first: where a Triton is
not built as 3.6 is, there is no launcher, and its kernels are launched as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from triton import knobs
from triton.compiler import CompiledKernel

from assay.flash import descriptors

_BASE = "iiiKKppOOOOOO"
"""What the launcher takes before the kernel's arguments: grid, stream, function, two flags, scratch memory twice, the
kernel's numbers, and what hooks are told."""
_MOST = 1 << 16
"""Encoded descriptors that are kept, of some 400 bytes."""


class Launcher(NamedTuple):
    """Of one compiled kernel."""

    launch: Callable[..., None]
    rest: tuple[Any, ...]
    """What `launch` takes between the stream and the kernel's arguments."""
    encodings: list[dict[str, Any]]
    """How each of its descriptors is encoded, in the order of its arguments; none where a GPU has no copy engine."""


def launcher_of(kernel: CompiledKernel) -> Launcher | None:
    """None where there is none to be had, or where the kernel wants memory of its own."""
    try:
        run, function, driver = kernel.run, kernel.function, _driver()
        launch, encodings = run.launch, list(kernel.metadata.tensordesc_meta or ())
        if not isinstance(launch, BuiltinFunctionType):  # the Python that encodes descriptors
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        wants = run.global_scratch_size or run.profile_scratch_size
        known = isinstance(launch, BuiltinFunctionType) and _BASE == driver._BASE_ARGS_FORMAT
        known = known and callable(driver.make_tensordesc_arg)
        flags = run.launch_cooperative_grid, run.launch_pdl
        rest = (function, *flags, None, None, kernel.packed_metadata, None, None, None)
    except (AttributeError, ImportError, KeyError, TypeError):
        return None
    return Launcher(launch, rest, encodings) if known and not wants else None


def is_watched() -> bool:
    """Whether somebody has asked Triton to be told of every launch."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def taken(descriptor: Any, encoding: dict[str, Any] | None) -> tuple[Callable[[int], Any], list[Any]]:
    """For a descriptor like this of what is at an address: what the launcher takes, and what follows in any case."""
    if encoding is None:
        return _as_it_is, _driver().make_tensordesc_arg(descriptor, None)[1:]
    like = _Like(descriptors.bare(descriptor), encoding)
    return partial(_encoded, like), [*descriptor.shape, *descriptor.strides]


@dataclass(frozen=True, eq=False)
class _Like:
    """A descriptor but for its address, and how it is encoded; compared by identity."""

    bare: Any
    encoding: dict[str, Any]


@lru_cache(_MOST)
def _encoded(like: _Like, address: int) -> Any:
    return encode(descriptors.of(_Address(address), like.bare), like.encoding)


def encode(descriptor: Any, encoding: dict[str, Any]) -> Any:
    """As Triton does."""
    return _driver().make_tensordesc_arg(descriptor, encoding)[0]


def _as_it_is(address: int) -> int:
    return address


def _driver() -> Any:
    """Of CUDA: a Triton for other GPUs has none."""
    return import_module("triton.backends.nvidia.driver")


class _Address(NamedTuple):
    """In place of a tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address
