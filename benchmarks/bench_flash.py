"""`flash_attention` beside its peers: SDPA's cuDNN and FA2 on CUDA, SDPA on the CPU.

CUDA: forward and backward over head dimensions, lengths and masks (calls captured in a CUDA graph, so that what is
timed is the kernel); what knobs cost over the plain call; what a call from Python costs; working memory from 1k to 64k,
beside standard attention's. All contenders in turn, round by round, medians, inputs that rotate. Exits with 1 if a goal
is missed. What features cost: `bench_flash_features.py`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))

from assay import flash_attention
from assay.bench.timing import in_turn
from assay.flash.numerics import Numerics
from benchmarks.bench_flash_cpu import bench_cpu

FORWARD_GOAL, BACKWARD_GOAL = 0.85, 0.7
"""Speed over cuDNN's; and over FA2's at least 1."""
KNOB_GOAL = 2.0
"""Time of a perturbed kernel over the plain one."""
TOKENS, HIDDEN = 16384, 2048
Work = Callable[[], object]


def draw(
    length: int, dim: int, kv_heads: int | None = None, sets: int = 3, dtype: torch.dtype = torch.bfloat16
) -> list[list[torch.Tensor]]:
    heads, batch = HIDDEN // dim, max(1, TOKENS // length)
    shapes = [(batch, heads, length, dim)] + 2 * [(batch, kv_heads or heads, length, dim)]
    return [[torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes] for _ in range(sets)]


def captured(make: Callable[[], list[Work]]) -> Work:
    """Calls one after the other as one CUDA graph.

    They are made on the stream that is captured: autograd runs backward where forward ran.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls = make()
        for call in calls:
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)

    def replay(_: list[Work] = calls) -> None:  # what was recorded reads what they hold
        graph.replay()

    return replay


def milliseconds(works: list[Work], rounds: int) -> list[float]:
    """Median of each, in turn."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + 1):
        for i in in_turn(len(works), turn):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            works[i]()
            end.record()
            torch.cuda.synchronize()
            if turn:
                times[i].append(start.elapsed_time(end))
    return [statistics.median(t) for t in times]


def peer(backend: SDPBackend, causal: bool) -> Callable[..., torch.Tensor]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return call


def forward_works(call: Callable[..., torch.Tensor], sets: list[list[torch.Tensor]]) -> Work:
    def run(each: list[torch.Tensor]) -> Work:
        plain = [x.detach() for x in each]
        return lambda: call(*plain)

    return captured(lambda: [run(each) for each in sets])


def backward_works(call: Callable[..., torch.Tensor], sets: list[list[torch.Tensor]]) -> Work:
    """Only the backward pass; the graph captures what follows the recorded forward."""

    def run(each: list[torch.Tensor]) -> Work:
        out = call(*each)
        dout = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, each, dout, retain_graph=True)

    return captured(lambda: [run(each) for each in sets])


def bench_grid(name: str, rounds: int) -> bool:
    good = True
    make, factor, goal = {
        "forward": (forward_works, 4, FORWARD_GOAL),
        "backward": (backward_works, 10, BACKWARD_GOAL),
    }[name]
    ceiling = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul = 2 * 8192**3 / milliseconds([lambda: ceiling @ ceiling], 10)[0] / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, matmul {matmul:.0f} TFLOP/s")
    print("TFLOP/s (over cuDNN, over FA2)")
    for dim in (64, 128, 256):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                sets = draw(length, dim)
                calls = (
                    lambda q, k, v, causal=causal: flash_attention(q, k, v, causal=causal),
                    peer(SDPBackend.CUDNN_ATTENTION, causal),
                    peer(SDPBackend.FLASH_ATTENTION, causal),
                )
                ours, cudnn, fa2 = milliseconds([make(call, sets) for call in calls], rounds)
                flops = factor * TOKENS * length * HIDDEN * (0.5 if causal else 1.0) * len(sets)
                fine = cudnn / ours >= goal and fa2 / ours >= 1
                good &= fine
                print(
                    f"{name:8} D {dim:3} N {length:5} {'causal' if causal else 'full  '}: "
                    f"{flops / ours / 1e9:4.0f} ({cudnn / ours:.2f}, {fa2 / ours:.2f})"
                    f"{'' if fine else '  MISSED'}",
                    flush=True,
                )
                del sets
    return good


def bench_knobs(rounds: int) -> bool:
    good = True
    print("perturbed kernel over the plain one (forward)")
    knobs = {
        "row sum in bf16": Numerics(row_sum="bf16"),
        "rescale in bf16": Numerics(rescale="bf16"),
        "output in bf16": Numerics(output_accumulator="bf16"),
        "all three in fp16": Numerics(row_sum="fp16", rescale="fp16", output_accumulator="fp16"),
        "P in fp16": Numerics(probabilities="fp16"),
        "P in fp32": Numerics(probabilities="fp32"),
        "keys reversed": Numerics(reverse_keys=True),
        "sum after cast": Numerics(sum_after_cast=True),
    }
    for dim in (64, 128, 256):
        sets = draw(4096, dim)
        plain = forward_works(lambda q, k, v: flash_attention(q, k, v), sets)
        for name, numerics in knobs.items():
            work = forward_works(lambda q, k, v, n=numerics: flash_attention(q, k, v, numerics=n), sets)
            slow, fast = milliseconds([work, plain], rounds)
            fine = slow / fast <= KNOB_GOAL
            good &= fine
            print(f"{name:18} D {dim}: {slow / fast:.2f}×{'' if fine else '  MISSED'}", flush=True)
    return good


def bench_eager(rounds: int) -> bool:
    """Calls from Python, one by one, where the kernels are short: what is left is the time of the host."""
    print("a call from Python, N 256, one head, causal: microseconds (ours, SDPA's FA2, its cuDNN)")
    for dim in (64, 128, 256):
        for backward in (False, True):
            times = _microseconds(dim, backward, rounds)
            print(
                f"forward{' + backward' if backward else ''} D {dim}: {', '.join(f'{t:.0f}' for t in times)}",
                flush=True,
            )
    return True


def _microseconds(dim: int, backward: bool, rounds: int) -> list[float]:
    """Each twenty times in a row. Who is behind SDPA is chosen before: to choose takes time as well."""
    leaves = [torch.randn(1, 1, 256, dim, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for _ in "qkv"]
    q, k, v = leaves
    dout = torch.randn_like(q)
    contenders = (None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds + 1):
        for i in in_turn(len(contenders), turn):
            behind = contenders[i]
            with nullcontext() if behind is None else sdpa_kernel(behind):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    if behind is None:
                        out = flash_attention(q, k, v, causal=True)
                    else:
                        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                    if backward:
                        torch.autograd.grad(out, leaves, dout)
                torch.cuda.synchronize()
                times[i].append((time.perf_counter() - start) / 20)
    return [statistics.median(found[1:]) * 1e6 for found in times]


def bench_memory() -> bool:
    """Bytes beyond inputs, outputs and gradients, ours and standard attention's, as far as that fits.

    A straight line has slope 1 against N, standard attention 2.
    """
    print("working memory of forward + backward, one head of D 128, in bf16 (standard: softmax of the whole matrix)")
    calls: dict[str, Callable[..., torch.Tensor]] = {
        "ours": partial(flash_attention, causal=True),
        "deterministic": partial(flash_attention, causal=True, deterministic=True),
        "standard": _standard,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for length in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        for name, call in calls.items():
            found[name].append(_working_memory(call, length))
        line = ", ".join(
            f"{name} {sizes[-1] / 2**10:10,.0f} KB" if sizes[-1] < math.inf else f"{name} does not fit"
            for name, sizes in found.items()
        )
        print(f"N {length:6}: {line}", flush=True)
    growth = {name: [x for x in sizes if x < math.inf] for name, sizes in found.items()}
    last = {name: sizes[-1] / sizes[-2] for name, sizes in growth.items()}
    good = max(last["ours"], last["deterministic"]) <= 2.2
    print(
        "the last over the one before (linear 2, quadratic 4): "
        + ", ".join(f"{name} {x:.2f}" for name, x in last.items())
        + ("" if good else "  MISSED")
    )
    return good


def _standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention as the formula reads, causal."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[2], k.shape[2], device=q.device, dtype=torch.bool).triu_(1)
    out: torch.Tensor = scores.masked_fill_(later, -torch.inf).softmax(-1) @ v
    return out


def _working_memory(call: Callable[..., torch.Tensor], length: int) -> float:
    """Bytes at the peak of a forward and backward pass beyond its inputs and results; inf: more than the GPU has."""
    shape = (1, 1, length, 128)
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dout = torch.randn_like(leaves[0])
    results = 4 * dout.numel() * 2  # output and three gradients
    try:
        for _ in range(2):  # the first one compiles, and leaves its workspaces behind
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(call(*leaves), leaves, dout)
            peak = torch.cuda.max_memory_allocated() - before - results
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return math.inf
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[int], bool]] = {
        "forward": lambda rounds: bench_grid("forward", rounds),
        "backward": lambda rounds: bench_grid("backward", rounds),
        "knobs": bench_knobs,
        "eager": bench_eager,
        "memory": lambda _: bench_memory(),
        "cpu": lambda rounds: bench_cpu(rounds * 3),
    }
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="default: all that can run here")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and set(arguments.parts) - {"cpu"}:
        parser.error("needs a GPU, and here is none. Without one: bench_flash.py cpu.")
    wanted = arguments.parts or ([part for part in parts if part != "cpu"] if torch.cuda.is_available() else ["cpu"])
    torch.manual_seed(0)
    good = True
    for part in wanted:
        good &= parts[part](arguments.rounds)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
