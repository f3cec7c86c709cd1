"""Speed and memory of `wasserstein` and `deviation`, beside their peers in the same run.

On the CPU the peer is scipy. On CUDA it is two plain torch.sort calls, which are fast and need a lot of
memory; ours must come near their time within a small multiple of the inputs. Exit code 1: a goal was
missed.

On AMD Zen 4, numpy's AVX-512 sort is several times slower than its AVX2 sort; starting with
NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL" shows by how much.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.metrics.deviation import deviation
from assay.metrics.wasserstein import wasserstein

CPU_SIZE = 10**7
CPU_SPEEDUP = 20.0
"""Times faster than scipy at CPU_SIZE."""
AGREEMENT = 1e-12
"""Relative difference from the peer's result."""
CUDA_SIZES = (10**8, 10**9)
CUDA_SECONDS = 0.15
"""At the largest of CUDA_SIZES."""
CUDA_MEMORY = 3.0
"""Peak memory over the size of the inputs, inputs included."""
DEVIATION_CPU_SIZE = 10**8
DEVIATION_CPU_SECONDS = 5.0
DEVIATION_CUDA_SIZE = 10**9


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure and what it should be."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure keeps its limit; NaN does not."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        relation = "at least" if self.at_least else "at most"
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:6}  {self.name}: {self.value:.3g} ({relation} {self.limit:g})"


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def relative_difference(x: float, y: float) -> float:
    return abs(x - y) / abs(y) if y else math.inf


def bench_cpu(size: int, repeats: int) -> list[Goal]:
    from scipy.stats import wasserstein_distance

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(size, generator=generator), torch.randn(size, generator=generator) * 1.01
    wide_a, wide_b = a.double().numpy(), b.double().numpy()
    ours, theirs, expected = [], [], math.nan
    for _ in range(repeats):  # interleaved, so that both meet the same machine
        ours.append(seconds(lambda: wasserstein(a, b)))
        start = time.perf_counter()
        expected = float(wasserstein_distance(wide_a, wide_b))
        theirs.append(time.perf_counter() - start)
    mine, peer = statistics.median(ours), statistics.median(theirs)
    found = wasserstein(a, b)
    print(f"CPU, W1 of {size:.0e} against {size:.0e} FP32, medians of {repeats}")
    print(f"  assay {mine:.3f} s   scipy {peer:.2f} s")
    return [
        Goal("CPU speed over scipy", peer / mine, CPU_SPEEDUP, at_least=True),
        Goal("CPU relative difference from scipy", relative_difference(found, expected), AGREEMENT),
    ]


def bench_cpu_deviation(size: int, repeats: int) -> list[Goal]:
    reference = torch.randn(size, generator=torch.Generator().manual_seed(0))
    actual = reference.bfloat16()
    plain = statistics.median(seconds(lambda: deviation(actual, reference)) for _ in range(repeats))
    bare = statistics.median(seconds(lambda: deviation(actual, reference, quantiles=())) for _ in range(repeats))
    print(f"CPU, deviation of {size:.0e} BF16 from FP32: {plain:.2f} s, without quantiles {bare:.2f} s")
    return [Goal("CPU deviation seconds", plain, DEVIATION_CPU_SECONDS)]


def two_sorts(a: Tensor, b: Tensor) -> float:
    """The plain way: sort both, then the mean distance in FP64, in pieces only to fit in memory."""
    x, y = torch.sort(a).values, torch.sort(b).values
    parts = zip(x.split(2**25), y.split(2**25), strict=True)
    return sum(float((u.double() - v.double()).abs().sum()) for u, v in parts) / len(x)


def on_cuda(work: Callable[[], float], repeats: int) -> tuple[float, float, int]:
    """Result, median seconds, and peak bytes, after one call to warm up."""
    result = work()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return result, statistics.median(times), torch.cuda.max_memory_allocated()


def bench_cuda(size: int, repeats: int) -> list[Goal]:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(size, generator=generator, device="cuda")
    b = torch.randn(size, generator=generator, device="cuda").mul_(1.01)
    inputs = 8 * size
    expected, peer, peer_peak = on_cuda(lambda: two_sorts(a, b), repeats)
    found, mine, peak = on_cuda(lambda: wasserstein(a, b), repeats)
    print(f"CUDA ({torch.cuda.get_device_name()}), W1 of {size:.0e} against {size:.0e} FP32")
    print(f"  assay     {mine:.4f} s   peak {peak / inputs:.2f} times the inputs")
    print(f"  two sorts {peer:.4f} s   peak {peer_peak / inputs:.2f} times the inputs")
    goals = [
        Goal(f"CUDA memory at {size:.0e}, times the inputs", peak / inputs, CUDA_MEMORY),
        Goal(f"CUDA relative difference at {size:.0e}", relative_difference(found, expected), AGREEMENT),
    ]
    if size == max(CUDA_SIZES):
        goals.append(Goal(f"CUDA seconds at {size:.0e}", mine, CUDA_SECONDS))
    return goals


def bench_cuda_deviation(size: int, repeats: int) -> None:
    reference = torch.randn(size, device="cuda")
    actual = reference.bfloat16()
    _, mine, peak = on_cuda(lambda: deviation(actual, reference, "bf16").max, repeats)
    print(f"CUDA, deviation of {size:.0e} BF16 from FP32: {mine:.3f} s")
    print(f"  peak {peak / (6 * size):.2f} times the inputs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-cpu", action="store_true", help="measure CUDA only")
    options = parser.parse_args()
    goals: list[Goal] = []
    if not options.skip_cpu:
        goals += bench_cpu(CPU_SIZE, options.repeats)
        goals += bench_cpu_deviation(DEVIATION_CPU_SIZE, options.repeats)
    if torch.cuda.is_available():
        for size in CUDA_SIZES:
            goals += bench_cuda(size, options.repeats)
            torch.cuda.empty_cache()
        bench_cuda_deviation(DEVIATION_CUDA_SIZE, options.repeats)
    print(*goals, sep="\n")
    return 0 if goals and all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
