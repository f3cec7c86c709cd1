"""The record on Hopper: ours beside SDPA's cuDNN and FA2 and compiled FlexAttention, in one process, on one GPU.

bf16, 16,384 tokens, hidden size 2048. Forward, backward, and both together, over head dimensions, lengths and masks;
other kinds of calls (ragged lengths, GQA, strided views, windows, packed batches) beside cuDNN where it can do them,
and beside our own plain kernel; the deterministic backward; FP8. All contenders take turns, round by round, in an
order in which each follows each other, and an 8192³ matrix product with them. Random data, every set of inputs larger
than the L2 cache, medians, clocks as found. Calls are captured in CUDA graphs; `--eager` also times some from Python,
one by one.

Before ours is timed its results are held against cuDNN's: a kernel that is fast and wrong has no figure. Windows, which
cuDNN cannot do through SDPA, and packed batches, which it takes but no CUDA graph of it, are left to the tests.

    python benchmarks/bench_record.py --json record.json            all goals
    python benchmarks/bench_record.py --quick forward               twelve shapes of one pass
    python benchmarks/bench_record.py forward backward --flex       with FlexAttention, on a few shapes

Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, it finds the others here

from assay import flash_attention
from assay.bench.ceiling import matmul_of
from assay.bench.memory import let_go
from assay.bench.reasons import reason_of
from assay.bench.timing import cuda_clock, interleaved
from assay.results.environment import environment
from benchmarks.bench_flash import HIDDEN, Work, captured, draw, peer
from benchmarks.record import (
    CUDNN,
    FA2,
    FLEX,
    FP8,
    FP8_KERNEL,
    FP16,
    GROUP,
    OURS,
    PARTS,
    PLAIN,
    Case,
    Part,
    Point,
    Record,
    cases,
    judged,
    takes_eager,
    takes_flex,
)

Attention = Callable[..., torch.Tensor]
Inputs = list[torch.Tensor]
"""Q, K and V."""
DEVICE = torch.device("cuda")
EIGHT_BITS: dict[str, Any] = {"fp8": True}
"""How `flash_attention` is asked for FP8."""
SAMPLE_SECONDS = 0.01
"""Replays of a graph for one sample take about so long; one replay at least."""
WRONG = 4 * torch.finfo(torch.bfloat16).eps
"""Relative difference to cuDNN's results, in the Euclidean norm. Rounding gives less than one spacing of bf16 (eps)."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody, and what they are given."""

    name: str
    call: Attention
    sets: list[Inputs]


def ours(case: Case) -> Attention:
    """Our call, with what the case's kind needs."""
    how: dict[str, Any] = {"causal": case.causal}
    if case.window:
        how = {"window": (case.window - 1, 0)}
    if case.packed:
        ends = torch.tensor((0, *case.packed), device=DEVICE).cumsum(0, dtype=torch.int32)
        how["cu_seqlens_q"] = ends
    if case.kind == "deterministic":
        how["deterministic"] = True
    if case.kind == FP8:
        how |= EIGHT_BITS
    return partial(flash_attention, **how)


def inputs(case: Case) -> list[Inputs]:
    """Random, each set four times the L2 cache of an H200 (50 MB): they rotate, and none is found there."""
    sets = draw(
        case.length,
        case.dim,
        kv_heads=HIDDEN // case.dim // GROUP if case.kind == "GQA" else None,
        sets=2 if case.length >= 8192 else 3,
        dtype=torch.float16 if case.kind == FP16 else torch.bfloat16,
    )
    return [[_strided(x) for x in each] for each in sets] if case.kind == "strided" else sets


def _strided(x: torch.Tensor) -> torch.Tensor:
    """A (batch, heads, length, dim) view of (batch, length, heads, dim), as a projection gives it."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def contenders(case: Case, flex: bool) -> list[Contender]:
    """Ours first."""
    sets = inputs(case)
    eight_bits = case.kind in (FP8, FP8_KERNEL)
    found = [Contender(OURS, fp8_kernel(case, sets) if case.kind == FP8_KERNEL else ours(case), sets)]
    if not case.window and not case.packed and not eight_bits:
        found.append(Contender(CUDNN, peer(SDPBackend.CUDNN_ATTENTION, case.causal), sets))
    if case.kind == "plain":
        found.append(Contender(FA2, peer(SDPBackend.FLASH_ATTENTION, case.causal), sets))
        if flex and takes_flex(case):
            found.append(Contender(FLEX, flex_attention(case.length, case.causal), sets))
    twin = case.twin
    if twin is not None:
        found.append(Contender(PLAIN, ours(twin), inputs(twin)))
    return found


def fp8_kernel(case: Case, sets: list[Inputs]) -> Attention:
    """Ours with sums of one level, on inputs that were quantised before; which, their address tells."""
    from assay.flash import fp8_launch
    from assay.flash.fp8 import FP8 as How

    how, scale = How(two_level=False), case.dim**-0.5
    ready = {q.data_ptr(): fp8_launch.quantize_all(q.detach(), k.detach(), v.detach(), scale, how) for q, k, v in sets}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        right = 0 if case.causal else None
        fp8_launch.attend(ready[q.data_ptr()], out, lse, None, scale, None, right, None)
        return out

    return call


def flex_attention(length: int, causal: bool) -> Attention:
    """Compiled for this shape alone."""
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functorch.donated_buffer = False  # a graph's backward is timed again and again
    torch.compiler.reset()  # else shapes before this one count against the number of recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=str(DEVICE))
    return partial(compiled, block_mask=mask)


def calls(part: Part, contender: Contender) -> list[Work]:
    """One for each set of inputs."""

    def one(each: Inputs) -> Work:
        # FlexAttention's forward is that of training: compiled once for both passes. The kernels are the same.
        plain = each if contender.name == FLEX else [x.detach() for x in each]
        if part == "forward":
            return lambda: contender.call(*plain)
        if part == "both":
            gradient = torch.randn_like(contender.call(*plain))
            return lambda: torch.autograd.grad(contender.call(*each), each, gradient)
        out = contender.call(*each)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, each, gradient, retain_graph=True)

    return [one(each) for each in contender.sets]


def one_by_one(part: Part, contender: Contender) -> Work:
    """The calls from Python."""
    works = calls(part, contender)

    def run() -> None:
        for work in works:
            work()

    return run


def results(part: Part, call: Attention, each: Inputs, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output, or the gradients."""
    out = call(*each)
    return (out.detach(),) if part == "forward" else torch.autograd.grad(out, each, gradient)


def difference(part: Part, one: Attention, other: Attention, each: Inputs) -> float:
    """The largest of all results' distances, relative to the size of the other's."""
    gradient = torch.randn_like(each[0])
    pairs = zip(results(part, one, each, gradient), results(part, other, each, gradient), strict=True)
    return max(relative(a, b) for a, b in pairs)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of a and b over the size of b; a NaN is as wrong as can be."""
    far = torch.linalg.vector_norm((a - b).float()) / torch.linalg.vector_norm(b.float())
    return float(far.nan_to_num(torch.inf))


def same_bits(call: Attention, each: Inputs) -> bool:
    """Whether two reruns give the gradients of the first."""
    gradient = torch.randn_like(each[0])
    try:
        first, *again = (results("backward", call, each, gradient) for _ in range(3))
    except Exception:  # timing says why
        return False
    return all(torch.equal(a, b) for rerun in again for a, b in zip(first, rerun, strict=True))


def medians(works: Sequence[Work], rounds: int) -> list[float | Exception]:
    """Milliseconds of each, or why there are none."""
    times: list[list[float]] = [[] for _ in works]
    failed: dict[int, Exception] = {}
    for i, seconds in interleaved(works, cuda_clock, rounds, SAMPLE_SECONDS):
        if isinstance(seconds, Exception):
            failed[i] = seconds
        else:
            times[i].append(seconds)
    return [failed[i] if i in failed else 1e3 * statistics.median(times[i]) for i in range(len(works))]


@cache
def matmul() -> tuple[Work, float]:
    """The 8192³ product and its FLOPs."""
    return matmul_of(torch.bfloat16, DEVICE)


def timed(
    part: Part, taking_part: Sequence[Contender], make: Callable[[Part, Contender], Work], rounds: int
) -> tuple[dict[str, float], dict[str, str], float]:
    """Milliseconds of a call by name, why somebody has none, and the TFLOP/s of the matrix product between them."""
    product, flops = matmul()
    ready: list[tuple[Contender, Work]] = []
    ms: dict[str, float] = {}
    missing: dict[str, str] = {}
    for contender in taking_part:
        try:
            ready.append((contender, make(part, contender)))
        except Exception as error:  # whatever somebody's kernel raises is their reason
            missing[contender.name] = reason_of(error)
    *found, of_product = medians([*(work for _, work in ready), product], rounds)
    for (contender, _), time_of in zip(ready, found, strict=True):
        if isinstance(time_of, Exception):
            missing[contender.name] = reason_of(time_of)
        else:
            ms[contender.name] = time_of / len(contender.sets)
    return ms, missing, 0.0 if isinstance(of_product, Exception) else flops / of_product / 1e9


def graph(part: Part, contender: Contender) -> Work:
    """The calls as one CUDA graph."""
    with torch.cuda.stream(torch.cuda.current_stream()):  # which torch does not put back where a capture fails
        return captured(lambda: calls(part, contender))


def measure(case: Case, part: Part, everyone: Sequence[Contender], *, rounds: int, eager: bool) -> Point:
    """Check, then time."""
    first = everyone[0]
    twin = case.twin
    point = Point(
        part=part,
        kind=case.kind,
        name=case.name,
        dim=case.dim,
        length=case.length,
        causal=case.causal,
        flops=case.flops(part),
        twin_flops=0.0 if twin is None else twin.flops(part),
        same_bits=same_bits(first.call, first.sets[0]) if case.kind == "deterministic" else None,
    )
    wrong = _wrong(part, everyone)
    taking_part = [contender for contender in everyone if not (wrong and contender is first)]
    ms, missing, rate = timed(part, taking_part, graph, rounds)
    eager_ms = timed(part, taking_part, one_by_one, rounds)[0] if eager else {}
    return replace(point, ms=ms, eager_ms=eager_ms, matmul=rate, missing=({OURS: wrong} if wrong else {}) | missing)


def _wrong(part: Part, everyone: Sequence[Contender]) -> str | None:
    """What is wrong with our results, if cuDNN's tell."""
    first, other = everyone[0], next((who for who in everyone if who.name == CUDNN), None)
    if other is None or other.sets is not first.sets:
        return None
    try:
        found = difference(part, first.call, other.call, first.sets[0])
    except Exception:  # of whoever cannot do it: timing says who, and why
        return None
    return f"WRONG: {found:.1e} off cuDNN's results" if found > WRONG else None


def line_of(point: Point) -> str:
    """One row of what is printed on the way."""
    rate, share = point.rate(OURS), point.ceiling_share
    others = [f"{who} {ratio:.2f}" for who in (CUDNN, FA2, FLEX, PLAIN) if (ratio := point.over(who)) is not None]
    parts = [f"{point.part:8} {point.name:40}", "   –" if rate is None else f"{rate:4.0f}"]
    parts.append(f"{share or 0:4.0%} of matmul {point.matmul:3.0f}; over {', '.join(others) or 'nobody'}")
    if point.eager_ms:
        eager, ratio = point.rate(OURS, eager=True), point.over(CUDNN, eager=True)
        parts.append(f"; from Python {eager or 0:4.0f}{'' if ratio is None else f', over cuDNN {ratio:.2f}'}")
    parts += [f"; {who}: {why}" for who, why in point.missing.items()]
    return " ".join(parts[:2]) + " TFLOP/s, " + "".join(parts[2:])


def fp8_rmse(draws: int = 16) -> float:
    """Root mean square error against FP64 on FA3's inputs: N(0, 1), one number in a thousand N(0, 100) on top.

    Of several draws: a few large numbers decide, and single draws gave 8.1e-3 to 9.3e-3.
    """
    source = torch.Generator(DEVICE).manual_seed(0)

    def one() -> torch.Tensor:
        x, outlier = (torch.randn(1, 8, 4096, 128, device=DEVICE, generator=source) for _ in range(2))
        there = torch.rand(x.shape, device=DEVICE, generator=source) < 1e-3
        return (x + 10 * outlier * there).bfloat16()

    squares: list[float] = []
    for _ in range(draws):
        q, k, v = one(), one(), one()
        exact = torch.softmax(q.double() @ k.double().mT * q.shape[3] ** -0.5, -1) @ v.double()
        squares.append(float((flash_attention(q, k, v, **EIGHT_BITS) - exact).square().mean()))
    print(f"FP8 RMSE of {draws} draws: {math.sqrt(min(squares)):.2e}–{math.sqrt(max(squares)):.2e}", flush=True)
    return math.sqrt(statistics.fmean(squares))


def compile_first(wanted: Sequence[Case], jobs: int, flex: bool) -> None:
    """All on several cores, into the caches on disk: one by one they would take longer than all measuring."""
    everything = [each for case in wanted for each in (case, case.twin) if each is not None]
    everything.sort(key=lambda case: len(case.parts))  # where several are one kernel, the one with most passes stays
    tasks = [(case, OURS) for case in {(case.kind, case.dim, case.causal): case for case in everything}.values()]
    tasks += [(case, FLEX) for case in wanted if flex and takes_flex(case)]
    with ProcessPoolExecutor(min(jobs, len(tasks)), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*tasks, strict=True)))


def _compile(case: Case, who: str) -> None:
    """Whatever goes wrong shows again, with its reason, where it is measured."""
    try:
        first = contenders(case, flex=False)[0]
        each = first.sets[0]
        backward = any(part != "forward" for part in case.parts) or who == FLEX
        call = flex_attention(case.length, case.causal) if who == FLEX else first.call
        out = call(*(each if backward else [x.detach() for x in each]))
        if backward:
            torch.autograd.grad(out, each, torch.ones_like(out))
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{who}, {case.name}: {reason_of(error)}", flush=True)


def has_fp8() -> bool:
    """Whether this `flash_attention` has FP8."""
    return all(name in inspect.signature(flash_attention).parameters for name in EIGHT_BITS)


def show_goals(record: Record) -> bool:
    """Print them; whether none is missed."""
    verdicts = judged(record)
    print(f"\n{'goal':50} {'wanted':>9} {'measured':>9}   of")
    for verdict in verdicts:
        outcome = {None: "not measured", True: "met", False: "MISSED"}[verdict.met]
        print(f"{verdict.name:50} {verdict.wanted:>9} {verdict.shown:>9} {verdict.of:4}   {outcome}")
    return all(verdict.met is not False for verdict in verdicts)


def run(record: Record, wanted: Sequence[Case], arguments: argparse.Namespace) -> None:
    """Measure all, and keep what there is after every case."""
    for case in wanted:
        everyone = contenders(case, arguments.flex)
        for part in case.parts:
            point = measure(case, part, everyone, rounds=arguments.rounds, eager=arguments.eager and takes_eager(case))
            record.points.append(point)
            print(line_of(point), flush=True)
            let_go(DEVICE)
        del everyone
        let_go(DEVICE)
        if arguments.json is not None:
            record.write(arguments.json)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all; with --quick forward, backward")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too; seconds of compiling for each shape")
    parser.add_argument(
        "--eager", action="store_true", help="also time calls from Python, without a graph: plain, N 1024 and 8192"
    )
    parser.add_argument("--rounds", type=int, default=8, help="samples of each; their median counts")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the record there")
    found = parser.parse_args(words)
    if found.rounds < 1 or found.jobs < 1:
        parser.error(f"--rounds and --jobs must be at least 1, got {found.rounds} and {found.jobs}.")
    found.parts = found.parts or (["forward", "backward"] if found.quick else list(PARTS))
    return found


def main(words: Sequence[str] | None = None) -> None:
    arguments = parsed(words)
    if not torch.cuda.is_available():
        print("The record is one of a GPU, and here is none: nothing is measured.")
        return
    start = time.perf_counter()
    wanted = cases(arguments.parts, quick=arguments.quick)
    if "fp8" in arguments.parts and not has_fp8():
        print("flash_attention takes no fp8 here: FP8 is not measured.")
        wanted = [case for case in wanted if case.kind not in (FP8, FP8_KERNEL)]
    if not wanted:
        return
    compile_first(wanted, arguments.jobs, arguments.flex)
    print(f"compiled in {time.perf_counter() - start:.0f} s")
    torch.manual_seed(0)
    versions = environment(str(DEVICE)) | {"cudnn": torch.backends.cudnn.version()}
    record = Record(date=datetime.now(UTC).isoformat(timespec="seconds"), environment=versions)
    print(
        f"{versions['device']}, torch {versions['torch']}, Triton {versions['triton']}, cuDNN {versions['cudnn']}, bf16"
    )
    run(record, wanted, arguments)
    if any(case.kind == FP8 for case in wanted):
        record.fp8_rmse = fp8_rmse()
    if arguments.json is not None:
        record.write(arguments.json)
    good = show_goals(record)
    print(f"{time.perf_counter() - start:.0f} s in all")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: looking through it takes 0.2 s, and that after every point
    main()
