# mypy: ignore-errors
"""Options of a run, what it counts, its errors, and which partition runs."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from dataclasses import dataclass

import numpy as np

np.seterr(all="ignore")


@dataclass
class Options:
    """Change `options.…` before a launch."""

    seed: int | None = None  # of the next launch; each launch takes the next number after it
    races: bool = True  # check by happens-before that shared memory is read and written in order
    fences: bool = True  # generic writes need fence_async_shared before TMA stores and wgmma read them
    uninitialised: bool = True  # reading shared memory nobody wrote is an error (not only NaN)
    end_checks: bool = True  # at the end of a CTA nothing is in flight, no barrier half full
    resident: int | None = None  # CTAs that run at once; None: 1 to 3, drawn
    max_steps: int = 5_000_000  # scheduler steps before we call it a livelock
    switch: float | None = None  # chance to switch at a possible point; None: drawn for each launch
    smem_limit: int = 232_448  # bytes of all allocations together (Triton may reuse dead ones): a warning
    trace: bool = False  # print every event


options = Options()
stats: dict = {"launches": 0, "steps": 0, "smem": 0}


class EmuError(Exception):
    """What the kernel does wrong (or what the emulator cannot do: it says so)."""


class Unsupported(EmuError):
    pass


class Deadlock(EmuError):
    pass


class Race(EmuError):
    pass


class BarrierError(EmuError):
    pass


class _Abort(BaseException):
    """Ends the other partitions after an error."""


_KERNEL_FILES: set[str] = set()


def where(depth=4) -> tuple:
    """The innermost frames in kernel files: (file, line, function)."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if code.co_filename in _KERNEL_FILES:
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def show(place, indent="    ") -> str:
    lines = []
    for file, line, name in place:
        text = linecache.getline(file, line).strip()
        lines.append(f"{indent}{os.path.basename(file)}:{line} {name}: {text}")
    return "\n".join(lines)


class _Active(threading.local):
    task = None
    plain = 0


_active = _Active()


def current():
    """The partition that runs."""
    task = _active.task
    if task is None:
        raise EmuError(f"this can only be called inside a kernel\n{show(where())}")
    return task
