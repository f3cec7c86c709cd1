"""The numeric re-implementation of attention beside the same thing written literally.

CPU: against the literal double loop of the tests. CUDA: the fused kernels against the same emulation as torch
operations. And how memory grows with the sequence length. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from assay import Plan, tiled_attention
from assay.cases.attention.fused import as_torch_operations
from tests.cases import literal

CPU_GOAL = 10.0
"""Times faster than the literal double loop (H = 2, N = 4096, D = 64, block 64, FA1, every step in bf16)."""
CUDA_GOAL = 10.0
"""Times faster than the same emulation as torch operations."""
MEMORY_GOAL = 0.02
"""Working memory at 32k, as a share of what the scores of one head alone would take."""
GROWTH_GOAL = 2.2
"""On CUDA, where it is counted to the byte: working memory at 32k over that at 16k (linear 2, quadratic 4)."""


def timed(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def inputs(heads: int, length: int, dim: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, dim, generator=generator).to(device, torch.bfloat16) for _ in range(3)]


def bench_cpu(repeats: int) -> bool:
    q, k, v = inputs(2, 4096, 64, "cpu")
    plan = Plan.uniform("bf16")

    def spelled_out() -> torch.Tensor:
        return torch.stack([literal.fa1(q[0, h], k[0, h], v[0, h], (64, 64)) for h in range(2)])[None]

    def ours() -> torch.Tensor:
        return tiled_attention(q, k, v, plan=plan, order="fa1", block=(64, 64))

    equal = (spelled_out() == ours()).double().mean().item()
    pairs = [(timed(spelled_out, 1), timed(ours, 3)) for _ in range(repeats)]
    slow, fast = (statistics.median(side) for side in zip(*pairs, strict=True))
    good = bool(slow / fast >= CPU_GOAL)
    print(f"CPU   FA1 uniform bf16, H 2, N 4096, D 64: literal {slow:.3f} s, ours {fast:.3f} s, ", end="")
    print(f"{slow / fast:.1f}× (goal {CPU_GOAL:.0f}×), equal bits {equal:.2%}{'' if good else '  MISSED'}")
    return good


def bench_cuda(repeats: int) -> bool:
    good = True
    print(torch.cuda.get_device_name())
    for heads, length, dim in ((2, 4096, 64), (16, 4096, 128), (16, 16384, 128)):
        tensors = [x.requires_grad_() for x in inputs(heads, length, dim, "cuda")]
        for order, plan in (
            ("fa1", Plan.uniform("bf16")),
            ("fa2", Plan.shipped("bf16")),
            ("fa2", Plan.uniform("e5m6")),
        ):

            def forward(order: str = order, plan: Plan = plan, tensors: list[torch.Tensor] = tensors) -> torch.Tensor:
                return tiled_attention(*tensors, plan=plan, order=order, block=(64, 64))  # type: ignore[arg-type]

            def both(forward: Callable[[], torch.Tensor] = forward) -> None:
                forward().sum().backward()

            for name, run in (("forward", forward), ("forward + backward", both)):
                run()
                fused = timed(run, 3 * repeats)
                with as_torch_operations():
                    run()
                    eager = timed(run, repeats)
                fine = eager / fused >= CUDA_GOAL
                good = good and fine
                print(
                    f"CUDA  {order} {plan.name}, H {heads}, N {length}, D {dim}, {name}: torch {eager * 1e3:.1f} ms, "
                    f"fused {fused * 1e3:.2f} ms, {eager / fused:.1f}×{'' if fine else '  MISSED'}"
                )
    return good


def _peak_kilobytes(length: int) -> tuple[float, float]:
    """Growth of the resident set while one call runs, in a process of its own; and its seconds."""
    program = (
        "import json, resource, sys, time, torch\n"
        "from assay import Plan, tiled_attention\n"
        "torch.manual_seed(0)\n"
        "n = int(sys.argv[1])\n"
        "small = [torch.randn(1, 1, 1024, 64) for _ in range(3)]\n"
        "tiled_attention(*small, plan=Plan.uniform('bf16'))\n"
        "q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "start = time.perf_counter()\n"
        "tiled_attention(q, k, v, plan=Plan.uniform('bf16'))\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps([after - before, time.perf_counter() - start]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(length)], capture_output=True, text=True, check=True)
    kilobytes, seconds = json.loads(done.stdout)
    return kilobytes, seconds


def bench_memory() -> bool:
    lengths = (4096, 8192, 16384, 32768)
    grown = []
    for length in lengths:
        kilobytes, seconds = _peak_kilobytes(length)
        grown.append(kilobytes)
        scores = length * length * 4 / 2**20
        print(
            f"CPU   N {length}: {kilobytes / 1024:.0f} MB more at the peak, {seconds:.2f} s "
            f"(scores alone: {scores:.0f} MB)"
        )
    share = grown[-1] * 1024 / (lengths[-1] ** 2 * 4)
    good = share <= MEMORY_GOAL
    print(f"      32k: {share:.2%} of the scores' size (goal {MEMORY_GOAL:.0%}){'' if good else '  MISSED'}")
    return good


def bench_cuda_memory() -> bool:
    peaks = []
    for length in (8192, 16384, 32768):
        q, k, v = inputs(1, length, 64, "cuda")
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        tiled_attention(q, k, v, plan=Plan.uniform("bf16"))
        peaks.append(torch.cuda.max_memory_allocated() - base)
        print(f"CUDA  N {length}: {peaks[-1] / 2**20:.1f} MB more at the peak")
    return peaks[-1] <= GROWTH_GOAL * peaks[-2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-cpu", action="store_true")
    arguments = parser.parse_args()
    good = True
    if not arguments.skip_cpu:
        good = bench_cpu(arguments.repeats) and bench_memory()
    if torch.cuda.is_available():
        good = bench_cuda(arguments.repeats) and bench_cuda_memory() and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
