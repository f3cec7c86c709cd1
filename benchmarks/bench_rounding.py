"""How fast `round_to` is beside torch's casts, ml_dtypes, qtorch, pychop and gfloat, in the same run.

    python benchmarks/bench_rounding.py

On CPU 4M floats, with CUDA also 1e8 beside a device copy. Every repeat runs all contenders once, so that
a slow moment of the machine strikes them alike; the medians are compared. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch

from assay.formats import Format, get, round_to
from assay.formats.modes import Rounding

CPU_COUNT, CPU_REPEATS = 4 * 1024 * 1024, 41
CUDA_COUNT, CUDA_REPEATS = 100_000_000, 20

# Goals: ours ÷ theirs, at most.
AGAINST_ROUND_TRIP = 1.2  # x.to(bf16).to(x.dtype): the same job, the same bytes written
AGAINST_BARE_CAST = 1.2  # x.to(bf16), which writes half the bytes, beside round_to(x, "bf16", dtype=bf16)
AGAINST_QTORCH = 1 / 5
AGAINST_PYCHOP = 1 / 25
# Goal: bytes read and written per second, ours ÷ those of a copy, at least.
OF_COPY_BANDWIDTH = 0.70

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
EMULATED = ("fp8_e4m3", "fp8_e5m2", "tf32", "e5m7", "fp4_e2m1")

Contender = Callable[[], object]


def main() -> int:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    met = [bench_native_on_cpu(), bench_emulated_on_cpu()]
    if torch.cuda.is_available():
        met.append(bench_on_cuda())
    else:
        print("\nNo CUDA device: the kernel is not measured.")
    return 0 if all(met) else 1


def bench_native_on_cpu() -> bool:
    x = torch.randn(CPU_COUNT)
    met = True
    for name, dtype in NATIVE.items():
        times = interleaved_medians(
            {
                "ours": partial(round_to, x, name),
                "torch round trip": partial(round_trip, x, dtype),
                f"ours, dtype={name}": partial(round_to, x, name, dtype=dtype),
                "torch bare cast": partial(x.to, dtype),
                **peers(x, get(name)),
            }
        )
        show(f"{name}, {CPU_COUNT:,} fp32 on CPU", times)
        met &= at_most("ours ÷ torch round trip", times["ours"] / times["torch round trip"], AGAINST_ROUND_TRIP)
        stored = times[f"ours, dtype={name}"] / times["torch bare cast"]
        met &= at_most(f"ours, dtype={name} ÷ torch bare cast", stored, AGAINST_BARE_CAST)
        print(f"  ours ÷ torch bare cast: {times['ours'] / times['torch bare cast']:.2f} (it writes half)")
        met &= beats_peers(times)
    return met


def bench_emulated_on_cpu() -> bool:
    x = torch.randn(CPU_COUNT)
    met = True
    for name in EMULATED:
        times = interleaved_medians({"ours": partial(round_to, x, name), **peers(x, get(name))})
        show(f"{name}, {CPU_COUNT:,} fp32 on CPU", times)
        met &= beats_peers(times)
    return met


def bench_on_cuda() -> bool:
    x = torch.randn(CUDA_COUNT, device="cuda")
    target = torch.empty_like(x)
    contenders: dict[str, Contender] = {"copy": lambda: target.copy_(x)}
    for name in (*NATIVE, *EMULATED):
        contenders[name] = partial(round_to, x, name)
    modes: tuple[Rounding, ...] = ("toward_zero", "up", "stochastic")
    for rounding in modes:
        contenders[f"fp8_e4m3 {rounding}"] = partial(round_to, x, "fp8_e4m3", rounding)
    contenders["torch bf16 round trip"] = partial(round_trip, x, torch.bfloat16)
    times = interleaved_medians(contenders, repeats=CUDA_REPEATS, clock=device_seconds)
    print(f"\n{CUDA_COUNT:,} fp32 on {torch.cuda.get_device_name()}")
    met = True
    for name, seconds in times.items():
        rate = 2 * 4 * CUDA_COUNT / seconds / 1e9
        print(f"  {name:28} {seconds * 1e3:8.3f} ms {rate:8.0f} GB/s {times['copy'] / seconds:6.2f} of a copy")
        if name in NATIVE or name in EMULATED:
            met &= at_least(f"{name} bandwidth ÷ copy", times["copy"] / seconds, OF_COPY_BANDWIDTH)
    return met


def round_trip(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x.dtype)


def peers(x: torch.Tensor, format: Format) -> dict[str, Contender]:
    """The same rounding by other libraries, as far as they are installed and know the format."""
    makers = {
        "ml_dtypes": ml_dtypes_peer,
        "qtorch": qtorch_peer,
        "pychop": pychop_peer,
        "gfloat": gfloat_peer,
    }
    found: dict[str, Contender] = {}
    for name, make in makers.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                peer = make(x, format)
        except ImportError as error:
            note(f"{name} is left out: {error}")
            continue
        if peer is not None:
            found[name] = peer
    return found


def ml_dtypes_peer(x: torch.Tensor, format: Format) -> Contender | None:
    ml_dtypes = importlib.import_module("ml_dtypes")
    names = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    names |= {"fp4_e2m1": "float4_e2m1fn"}
    if format.name not in names:
        return None
    array, dtype = x.numpy(), getattr(ml_dtypes, names[format.name])
    return lambda: array.astype(dtype).astype(array.dtype)


def qtorch_peer(x: torch.Tensor, format: Format) -> Contender:
    quant = importlib.import_module("qtorch.quant")  # compiles its C++ at the first import
    return lambda: quant.float_quantize(x, exp=format.exponent, man=format.mantissa, rounding="nearest")


def pychop_peer(x: torch.Tensor, format: Format) -> Contender:
    pychop = importlib.import_module("pychop")
    pychop.backend("torch")
    chop = pychop.Chop(exp_bits=format.exponent, sig_bits=format.mantissa, rmode=1)
    return lambda: chop(x)


def gfloat_peer(x: torch.Tensor, format: Format) -> Contender | None:
    gfloat = importlib.import_module("gfloat")
    formats = importlib.import_module("gfloat.formats")
    names = {"bf16": "bfloat16", "fp16": "binary16", "fp8_e4m3": "ocp_e4m3", "fp8_e5m2": "ocp_e5m2"}
    if format.name not in names:
        return None
    array, info = x.numpy(), getattr(formats, f"format_info_{names[format.name]}")
    return lambda: gfloat.round_ndarray(info, array)


def interleaved_medians(
    contenders: dict[str, Contender], repeats: int = CPU_REPEATS, clock: Callable[[Contender], float] | None = None
) -> dict[str, float]:
    """Median seconds of each. The slow ones, over 30 ms, run three times."""
    clock = clock or host_seconds
    seconds: dict[str, list[float]] = {}
    for name, run in contenders.items():
        run()  # compile
        seconds[name] = [clock(run)]
    for repeat in range(repeats - 1):
        # Forwards, then backwards: what ran before changes a time by up to a fifth.
        for name, run in list(contenders.items())[:: -1 if repeat % 2 else 1]:
            slow = seconds[name][0] > 0.03
            if slow and repeat >= 2:
                continue
            if not slow:
                run()  # get back the cache and the pages that the contender before has taken
            seconds[name].append(clock(run))
    return {name: statistics.median(times) for name, times in seconds.items()}


def host_seconds(run: Contender) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_seconds(run: Contender, queued: int = 10) -> float:
    """Of one run among several in the queue, so that what the host takes to start one is not counted."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(queued):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / queued


def beats_peers(times: dict[str, float]) -> bool:
    goals = {"qtorch": AGAINST_QTORCH, "pychop": AGAINST_PYCHOP}
    met = True
    for name, goal in goals.items():
        if name in times:
            met &= at_most(f"ours ÷ {name}", times["ours"] / times[name], goal)
    return met


def show(title: str, times: dict[str, float]) -> None:
    print(f"\n{title}")
    for name, seconds in times.items():
        print(f"  {name:28} {seconds * 1e3:9.3f} ms {seconds / times['ours']:8.2f} × ours")


def at_most(what: str, ratio: float, goal: float) -> bool:
    print(f"  {what}: {ratio:.3f}, goal at most {goal:.3g}: {'met' if ratio <= goal else 'MISSED'}")
    return ratio <= goal


def at_least(what: str, ratio: float, goal: float) -> bool:
    if ratio < goal:
        print(f"  {what}: {ratio:.2f}, goal at least {goal}: MISSED")
    return ratio >= goal


_noted: set[str] = set()


def note(text: str) -> None:
    if text not in _noted:
        print(text)
        _noted.add(text)


if __name__ == "__main__":
    sys.exit(main())
