"""Triton's own launchers, without a GPU: what reaches the driver from a call, and from the same one launched again.

`python -m tests.flash.driver_without_gpu FOLDER 90` is a process of its own, since its libcuda (`driver_without_gpu.c`)
stays. 80 instead: as on an A100, by the portable kernels.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from assay.flash import decode_launch, gpu, hopper, hopper_forward, launch, replay
from assay.flash.call import Call
from tests.flash.cases import Drawn
from tests.flash.test_hopper_compiles import CASES
from tests.flash.test_replay_decoding import cache_call

Found = list[tuple[Any, ...]]
STREAM = 7
COUNTER = torch.zeros(4, dtype=torch.int32)
_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)
)
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[bsuf](\d+)( \.ptr)?.*?(?:\[(\d+)\])?,?$", re.MULTILINE)
_DESCRIPTOR = 128


class Launches:
    """Those that came to the driver: kernel, grid and block, stream, parameters. Addresses have the numbers of `known`
    tensors, or those in which they came."""

    def __init__(self) -> None:
        self.kernels: WeakValueDictionary[int, CompiledKernel] = WeakValueDictionary()
        self.kinds: dict[int, list[tuple[int, bool]]] = {}
        self.used: list[Any] = []
        self.known: list[int] = []
        self.found: Found = []
        self.callback = _CALLBACK(self._add)

    def of(self, work: Callable[[], Any], *given: torch.Tensor | None) -> Found:
        """What it launches; what it makes stays until then, so that no address comes twice."""
        self.known, self.found = [x.data_ptr() for x in (COUNTER, *given) if x is not None], []
        work()
        return self.found

    def forget_kernels(self) -> None:
        """Triton's own references to what it compiled."""
        for kernel in self.used:
            kernel.device_caches.clear()
        gc.collect()

    def _add(self, function: int, grid: Any, stream: int, parameters: Any) -> None:
        kernel, kinds = self.kernels[function], self.kinds[function]
        read = [self._value(ctypes.string_at(parameters[i], size), pointer) for i, (size, pointer) in enumerate(kinds)]
        self.found.append((kernel.name, function, tuple(grid[:7]), stream, tuple(read)))

    def _value(self, value: bytes, pointer: bool) -> Any:
        if pointer:
            return self._place(value)
        return (self._place(value[:8]), value[8:]) if len(value) == _DESCRIPTOR else value

    def _place(self, address: bytes) -> int:
        at = int.from_bytes(address, "little")
        if at and at not in self.known:
            self.known.append(at)
        return self.known.index(at) if at else -1


def parameters_of(ptx: str) -> list[tuple[int, bool]]:
    """Of a kernel's parameters: bytes, and whether it is an address."""
    (entry,) = re.findall(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    found = _PARAMETER.findall(entry)
    assert len(found) == entry.count(".param") > 0, entry
    return [(int(many or int(bits) // 8), bool(pointer)) for bits, pointer, many in found]


class Driver:
    """Triton's for CUDA, but for what it asks torch."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.utils, self.launcher_cls, self.architecture = CudaUtils(), CudaLauncher, architecture

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


def library(folder: Path) -> ctypes.CDLL:
    """Built with the compiler that Triton itself needs."""
    source, built = Path(__file__).with_suffix(".c"), folder / "libcuda.so.1"
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


def silent(patch: pytest.MonkeyPatch, folder: Path, architecture: int) -> ctypes.CDLL:
    """Calls on CPU tensors go where those on such a GPU's would, and on to a driver that does nothing."""
    cuda = library(folder)
    patch.setattr(knobs.nvidia, "libcuda_path", str(folder))
    patch.setattr(driver, "_active", Driver(architecture))
    patch.setattr(hopper, "can", lambda call: architecture == 90)
    patch.setattr(gpu, "processors", lambda index: 132)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (hopper, hopper_forward, replay):
        patch.setattr(module, "counter", lambda device: COUNTER)
    patch.setattr(replay, "can", lambda x: True)
    patch.setattr(replay, "_stream", lambda device: STREAM)
    return cuda


def launches(patch: pytest.MonkeyPatch, folder: Path, architecture: int) -> Launches:
    """The same with a driver that notes what it is told."""
    found, held = Launches(), []
    silent(patch, folder, architecture).launched(found.callback)
    loading, launching, making = CompiledKernel._init_handles, replay.launch, replay._made

    def load(self: CompiledKernel) -> None:
        loading(self)
        found.kernels[self.function], found.kinds[self.function] = self, parameters_of(self.asm["ptx"])

    def launch(kernel: Any, *args: Any, **named: Any) -> None:
        found.used.append(kernel)
        launching(kernel, *args, **named)

    def make(*of: Any) -> torch.Tensor:
        held.append(making(*of))
        return held[-1]

    patch.setattr(CompiledKernel, "_init_handles", load)
    patch.setattr(replay, "launch", launch)
    patch.setattr(replay, "_made", make)
    return found


def compare(found: Launches, work: Callable[[], Any], *given: torch.Tensor | None) -> dict[str, Any]:
    """By Triton, by Triton once more while it is kept, and from what was kept."""
    again, held = [], []

    def launch_again(*args: Any) -> None:
        again.append(args)
        launching(*args)

    launching = replay._launch_again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_launch_again", launch_again)
        by_triton, kept = (found.of(lambda: held.append(work()), *given) for _ in range(2))
        found.forget_kernels()
        last = found.of(lambda: held.append(work()), *given)
    return {
        "launched": [name for name, *_ in by_triton],
        "again": len(again),
        "kept": by_triton == kept,
        "same": by_triton == last,
    }


def calls() -> Iterator[tuple[str, Callable[[], Any], tuple[torch.Tensor | None, ...]]]:
    """Of each: its name, what launches it, its tensors."""
    for name, case in CASES.items():
        call = Drawn(replace(case, dims=(64, 64), batch=1), torch.bfloat16).call()
        given = call.q, call.k, call.v, call.slopes, call.cu_seqlens_q, call.cu_seqlens_k
        made = torch.empty_like(call.q), torch.empty(call.q.shape[:3]), torch.empty_like(call.q)
        yield name, partial(forward, call), given
        yield f"{name}, backward", partial(backward, call, *made), given + made
    for paged in (False, True):
        cache = cache_call(paged, splits=3)
        of_cache = cache.q, cache.k, cache.v, cache.lengths, cache.table
        yield "decoding, paged" if paged else "decoding", partial(decode_launch.launch, cache), of_cache


def forward(call: Call) -> Any:
    return launch.forward(replace(call))  # a call counts its packed tiles once


def backward(call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor) -> Any:
    return launch.backward(replace(call), out, lse, dout, None, False)


def main(folder: Path, architecture: int) -> None:
    """Prints what came of it, as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        found = launches(patch, folder, architecture)
        told = {name: compare(found, work, *given) for name, work, given in calls()}
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
