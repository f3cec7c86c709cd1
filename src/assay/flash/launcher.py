"""A compiled kernel launched again: by Triton's launcher in C, without the Python in front of it.

That Python encodes every descriptor of the copy engine at every launch, and the launcher asks the driver about every
tensor's address. Here a descriptor is encoded once for each address, and addresses are given as numbers, of which
nothing is asked. What is reached for lies behind Triton's interface, so all of it is looked at first: where a Triton is
built neither as 3.6 is nor as 3.7 to 3.9 are, there is no launcher, and its kernels are launched as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from triton import knobs
from triton.compiler import CompiledKernel

from assay.flash import descriptors

_EACH = "iiiKKppOOOOOO"
"""What a kernel's own launcher, in Triton 3.6, takes before the kernel's arguments: grid, stream, function, two flags,
scratch memory twice, the kernel's numbers, and what hooks are told."""
_ALL = "iiiKKpp(iii)OOOOOOy*O"
"""What the launcher of all kernels, from 3.7 on, takes: grid, stream, function, two flags, the kernel's numbers, what
hooks are told, scratch memory twice, which arguments there are, of which types, and they themselves in a list."""
_GRID_AND_STREAM = 4
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
        run = kernel.run
        launch, encodings = run.launch, list(kernel.metadata.tensordesc_meta or ())
        if not isinstance(launch, BuiltinFunctionType):  # the Python that encodes descriptors
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        known = isinstance(launch, BuiltinFunctionType) and callable(_driver().make_tensordesc_arg)
        wants = run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False)
        flags = run.launch_cooperative_grid, run.launch_pdl
        no_hooks, no_memory = (None, None, None), (None, None)
        if hasattr(run, "kernel_signature"):
            rest: tuple[Any, ...] = (
                *flags,
                kernel.packed_metadata,
                *no_hooks,
                *no_memory,
                run.arg_annotations,
                run.kernel_signature,
            )
            known = known and _takes_all()
            launch = partial(_in_a_list, launch, _GRID_AND_STREAM + 1 + len(rest))
        else:
            rest = (*flags, *no_memory, kernel.packed_metadata, *no_hooks)
            known = known and _driver()._BASE_ARGS_FORMAT == _EACH
        found = Launcher(launch, (kernel.function, *rest), encodings)
    except (AttributeError, ImportError, KeyError, TypeError):
        return None
    return found if known and not wants else None


def _in_a_list(launch: Callable[..., None], first: int, *taken: Any) -> None:
    launch(*taken[:first], taken[first:])


@cache
def _takes_all() -> bool:
    """Whether the launcher of all kernels is the one that we know: Python is not told what it takes."""
    source = Path(_driver().__file__).with_name("driver.c")
    return source.is_file() and f'"{_ALL}"' in source.read_text()


def is_watched() -> bool:
    """Whether somebody has asked Triton to be told of every launch."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def taken(descriptor: Any, encoding: dict[str, Any] | None) -> tuple[Callable[[int], Any], list[Any]]:
    """For a descriptor like this of what is at an address: what the launcher takes, and what follows in any case."""
    if encoding is None:
        return _as_it_is, _parts(descriptor, None)[1:]
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
    return _parts(descriptor, encoding)[0]


def _parts(descriptor: Any, encoding: dict[str, Any] | None) -> list[Any]:
    """What a launcher takes for a descriptor; from 3.8 on Triton gives what does that a third argument, for AMD's."""
    make = _driver().make_tensordesc_arg
    third = (None,) if len(inspect.signature(make).parameters) > 2 else ()
    return list(make(descriptor, encoding, *third))


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
