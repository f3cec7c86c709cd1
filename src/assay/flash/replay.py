"""What a call launches, kept: the next call of the same kind launches it again, with its own tensors.

Tiles, grids, descriptors and Triton's choice of a compiled kernel follow from shapes, strides, dtypes and options, in
Python: that takes longer than a short kernel. All of these are in the key, by value, which tells more calls apart than
Triton does (by dtypes, by numbers that are 1 or multiples of 16, by what is None, by constants). Of an address it asks
whether it is a multiple of 16: here all are, or nothing is kept or taken. Of tensors nothing is kept: they are given
by their addresses, which is all that a kernel takes of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.language import constexpr

from assay.flash import descriptors, launcher
from assay.flash.counters import counter

Given = tuple[torch.Tensor | None, ...]
Addresses = list[int | None]
_Mover = Callable[[Addresses], Any]
"""From the addresses of a call's tensors, what one of its arguments is."""
_MOST = 4096
_STREAM = 3
"""Its place among what a launcher takes."""


class _Launch(NamedTuple):
    launch: Callable[..., None]
    arguments: list[Any]
    """With None in place of what moves."""
    moving: list[tuple[int, _Mover]]
    kernel: CompiledKernel
    """Held: from 3.8 on Triton takes it off the GPU when nobody does."""


class _Kept(NamedTuple):
    launches: list[_Launch]
    rooms: list[tuple[tuple[int, ...], torch.dtype]]
    counts: bool
    """Whether a kernel takes a counter."""


class _Recording:
    """Of one call: tensors have the numbers of those that are given, then the counter's, then those of rooms."""

    def __init__(self, given: Given) -> None:
        self.tensors = [*given, counter(_device(given))]
        self.number = {id(x): i for i, x in enumerate(self.tensors) if x is not None}
        self.complete = True
        self.kept = _Kept([], [], counts=False)
        self.counter = len(given)

    def add(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: Any) -> None:
        # Nothing is compiled in an interpreter.
        found = launcher.launcher_of(compiled) if isinstance(compiled, CompiledKernel) else None
        if found is None:
            self.complete = False
            return
        given = [*args, *(named.get(parameter.name, parameter.default) for parameter in kernel.params[len(args) :])]
        encodings = iter(found.encodings)
        arguments, moving = [*(*grid, 1, 1)[:3], None, *found.rest], []
        try:
            for parameter, value in zip(kernel.params, given, strict=True):
                place = len(arguments)
                arguments.append(value)
                mover: _Mover | None = None
                if isinstance(value, descriptors.KINDS):
                    at, rest = launcher.taken(value, next(encodings, None))
                    mover = self._from_address(value.base, at)
                    arguments += rest
                elif not parameter.is_constexpr:
                    mover = self._mover(value)
                if mover is not None:
                    arguments[place] = None  # nothing of this call's is kept
                    moving.append((place, mover))
        except _UnknownError:
            self.complete = False
        self.kept.launches.append(_Launch(found.launch, arguments, moving, compiled))

    def _mover(self, value: Any) -> _Mover | None:
        """None for what is the same in every call of this kind."""
        if isinstance(value, torch.Tensor):
            return itemgetter(self._number(value))
        if isinstance(value, tuple):
            parts = [self._mover(x) for x in value]
            if not any(parts):
                return None
            both = [(None if part else x, part) for x, part in zip(value, parts, strict=True)]
            return lambda addresses: tuple([part(addresses) if part else x for x, part in both])
        if value is None or isinstance(value, int | float | str | constexpr):
            return None
        raise _UnknownError

    def _from_address(self, x: torch.Tensor, made: Callable[[int], Any]) -> _Mover:
        number = self._number(x)
        return lambda addresses: made(addresses[number])  # type: ignore[arg-type]

    def _number(self, x: torch.Tensor) -> int:
        number = self.number.get(id(x))
        if number is None:
            raise _UnknownError
        if number == self.counter:
            self.kept = self.kept._replace(counts=True)
        return number


class _UnknownError(Exception):
    """An argument that a later call's cannot be made from."""


class _Here(threading.local):
    recording: _Recording | None = None


_HERE = _Here()
_SEEN: set[tuple[Any, ...]] = set()
_KNOWN: dict[tuple[Any, ...], _Kept | None] = {}
"""None: what cannot be kept."""


def can(x: torch.Tensor) -> bool:
    """Not in the interpreter, which compiles nothing."""
    return x.is_cuda


def replayed(given: Given, options: tuple[Any, ...], work: Callable[[], None]) -> None:
    """`work()`, or what it launched for a call of the same kind.

    It only launches, by `launch` below. Everything that it reads is in `options` or follows from the tensors' shapes,
    strides, dtypes and device; it takes further memory from `room`. One that gives a kernel another tensor is not kept.
    """
    addresses = [None if x is None else x.data_ptr() for x in given]
    key = None if launcher.is_watched() else _key(given, addresses, options)
    kept = None if key is None else _KNOWN.get(key)
    if kept is not None:
        _launch_again(kept, _device(given), addresses)
    elif key is None or not _is_worth_it(key, given):
        work()
    else:
        _record(key, given, work)


def _is_worth_it(key: tuple[Any, ...], given: Given) -> bool:
    """Whether to record a call: the second of its kind, as many kinds come once. And whether one can.

    A graph that is captured has a counter of its own; of one tensor given twice nobody can tell which an argument is.
    """
    if key not in _SEEN:
        if len(_SEEN) >= _MOST:
            forget()
        _SEEN.add(key)
        return False
    tensors = [id(x) for x in given if x is not None]
    return key not in _KNOWN and len(set(tensors)) == len(tensors) and not torch.cuda.is_current_stream_capturing()


def _key(given: Given, addresses: Addresses, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """None: there is an address that is no multiple of 16."""
    if any(address is not None and address & 15 for address in addresses):
        return None
    modes = torch.are_deterministic_algorithms_enabled(), knobs.runtime.debug, knobs.compilation.instrumentation_mode
    key = [_device(given), options, modes]
    for x in given:
        if x is None:
            key.append(None)
        else:
            key += x.shape, x.stride(), x.dtype, x.is_cuda
    return tuple(key)


def _record(key: tuple[Any, ...], given: Given, work: Callable[[], None]) -> None:
    recording = _HERE.recording = _Recording(given)
    try:
        work()
    finally:
        _HERE.recording = None
    _KNOWN[key] = recording.kept if recording.complete else None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """`kernel[grid](*args, **named)`, recorded if a call is. Triton 3.10 fuses no product with a sum unasked."""
    compiled = kernel[grid](*args, enable_fp_fusion=True, **named)
    if _HERE.recording is not None:
        _HERE.recording.add(kernel, compiled, grid, args, named)


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that the kernels of one call hand on; a call that is replayed has its own."""
    made = _made(shape, dtype, device)
    if (recording := _HERE.recording) is not None:
        recording.number[id(made)] = len(recording.tensors)
        recording.tensors.append(made)
        recording.kept.rooms.append((shape, dtype))
    return made


def forget() -> None:
    """All calls: for who changes how calls are launched."""
    _SEEN.clear()
    _KNOWN.clear()


def _launch_again(kept: _Kept, device: torch.device, addresses: Addresses) -> None:
    # Held until all is launched: an address that is free is given to the next who asks.
    held = [counter(device) if kept.counts else None]
    held += [_made(shape, dtype, device) for shape, dtype in kept.rooms]
    addresses += [None if x is None else x.data_ptr() for x in held]
    stream = _stream(device)
    for launch, arguments, moving, _ in kept.launches:
        arguments = arguments.copy()
        arguments[_STREAM] = stream
        for place, mover in moving:
            arguments[place] = mover(addresses)
        launch(*arguments)


def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _stream(device: torch.device) -> int:
    """The current one, as Triton asks for it: no Stream is made."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _device(given: Given) -> torch.device:
    assert given[0] is not None
    return given[0].device
