"""What a call costs the host, kernels left out: past torch's dispatcher and through it; launched again and by Triton.

On a machine without a GPU: calls on CPU tensors go where those on an H200's would, and are launched by a launcher, or
by Triton's on a driver, that does nothing. What CUDA's allocator, its driver and autograd's thread for a GPU take is
not in it: `bench_flash.py eager` has that. Exits with 1 where the shorter way takes longer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))

from assay.bench.timing import in_turn
from assay.flash import launch, launcher, library, ops, replay
from tests.flash import driver_without_gpu, fake_launches

CALLS, ROUNDS = 300, 15
Work = Callable[[], object]


def nothing(*_: Any) -> None:
    """In place of a launch."""


def launching_nothing(self: Any) -> launcher.Launcher:
    encodings = [x for x in self.dtypes if isinstance(x, dict)]
    return launcher.Launcher(nothing, ("function", *range(8)), encodings)


def works() -> dict[str, Work]:
    shape = 1, 1, 256, 64
    leaves = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    plain, dout = [x.detach() for x in leaves], torch.randn(shape, dtype=torch.bfloat16)
    rest = (*6 * (None,), 0.125, None, 0, None, 0.0, False, False, False, "")
    ends = torch.tensor([0, 100, 256], dtype=torch.int32)
    packed = (None, None, None, ends, ends, None, *rest[6:])
    return {
        "forward": lambda: ops.attention(*plain, *rest),
        "forward + backward": lambda: torch.autograd.grad(ops.attention(*leaves, *rest)[0], leaves, dout),
        "packed": lambda: ops.attention(*plain, *packed),
        "packed, with backward": lambda: torch.autograd.grad(ops.attention(*leaves, *packed)[0], leaves, dout),
    }


def in_turns(work: Work, take: Callable[[Any], None], ways: tuple[Any, Any]) -> tuple[float, float]:
    """Microseconds of a call, one way and the other: medians of readings in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 1):
        for way in in_turn(len(ways), turn):
            take(ways[way])
            start = time.perf_counter()
            for _ in range(CALLS):
                work()
            if turn:
                times[way].append((time.perf_counter() - start) / CALLS * 1e6)
    take(ways[0])
    return statistics.median(times[0]), statistics.median(times[1])


def launching(patch: pytest.MonkeyPatch) -> bool:
    """Prints what launching alone takes, from what was kept and by Triton; whether the first takes less."""
    with TemporaryDirectory() as folder:
        driver_without_gpu.silent(patch, Path(folder), 90)
        ways = replay.can, lambda x: False
        good = True
        print(f"Triton {triton.__version__}; us a call to launch its kernels: again, by Triton, ratio")
        for name, work, _ in driver_without_gpu.calls():
            again, by_triton = in_turns(work, partial(patch.setattr, replay, "can"), ways)
            good &= again < by_triton
            print(f"{name:21}: {again:6.1f}, {by_triton:6.1f}, {again / by_triton:.2f}", flush=True)
    return good


def main() -> None:
    torch.set_num_threads(1)
    good = True
    print(f"torch {torch.__version__}; us of the host a call: past the dispatcher, through it, ratio")
    with fake_launches.asking(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_backend", lambda cuda: launch)
        patch.setattr(fake_launches.Compiled, "launcher", launching_nothing)
        patch.setattr(launcher, "encode", lambda descriptor, encoding: None)
        patch.setattr(replay, "_made", lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))
        for name, work in works().items():
            ways = library.is_passed_on, lambda _: False
            past, through = in_turns(work, partial(patch.setattr, library, "is_passed_on"), ways)
            good &= past < through
            print(f"{name:21}: {past:6.1f}, {through:6.1f}, {past / through:.2f}", flush=True)
    with pytest.MonkeyPatch.context() as patch:
        good &= launching(patch)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
