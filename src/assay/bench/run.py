"""One shape, every contender: warm up, measure memory, then time all of them in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from assay.bench.ceiling import matmul_of
from assay.bench.contenders import Contender
from assay.bench.figures import Figure, Point
from assay.bench.graphs import graph_of
from assay.bench.inputs import Inputs, draw, work_on
from assay.bench.memory import free_bytes, let_go, peak_bytes, too_large
from assay.bench.reasons import reason_of
from assay.bench.shapes import Pass, Shape
from assay.bench.timing import Work, interleaved, stopwatch_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Tick = Callable[[str], None]
"""Called before and after each contender's turn, with what is going on."""

_SAMPLE_SECONDS = {"cuda": 0.02, "cpu": 0.02}
_SHORT_CALL = 3e-4
"""Seconds of a call below which launching it from Python may cost more than running it."""
_CALLS_IN_A_GRAPH = 10


def measure(
    point: Point,
    contenders: Sequence[Contender],
    *,
    backward: bool,
    device: torch.device,
    rounds: int,
    tick: Tick = lambda _: None,
) -> None:
    """Fill `point`. What a contender cannot do becomes its reason; nothing but Ctrl-C ends the run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some contenders warn at every call
            _measure(point, contenders, _passes(point.shape, backward), device, rounds, tick)
    except (RuntimeError, MemoryError) as error:  # even the inputs do not fit
        point.reason = reason_of(error)
    let_go(device)


def samples_of(shape: Shape, contenders: int, backward: bool, rounds: int) -> int:
    """How many samples a point takes where nobody refuses."""
    return (rounds + 1) * contenders * len(_passes(shape, backward))


def _passes(shape: Shape, backward: bool) -> list[Pass]:
    """A few queries are those of generating text, where nothing is trained."""
    return ["forward", "forward+backward"] if backward and not shape.few_queries else ["forward"]


def _measure(
    point: Point,
    contenders: Sequence[Contender],
    passes: Sequence[Pass],
    device: torch.device,
    rounds: int,
    tick: Tick,
) -> None:
    sets = draw(point.shape, DTYPES[point.dtype], device)
    point.input_sets = len(sets)
    ready: list[tuple[Figure, Work]] = []
    for contender in contenders:
        for which in passes:
            figure = Figure(contender=contender.name, flash=contender.flash, which=which)
            point.figures.append(figure)
            work = work_on(contender, which, point.shape.causal, sets)
            figure.reason = too_large(contender, point.shape, which, sets[0][0].dtype, free_bytes(device))
            if figure.reason is None:
                _warm_up(figure, work, device)
            if figure.reason is None:
                ready.append((figure, work))
            tick(f"{point.shape.name}, {contender.name}")
    _time(point, ready, sets, device, rounds, tick)
    if device.type == "cuda":
        _time_graphs(ready, len(sets), device, rounds)


def _warm_up(figure: Figure, work: Work, device: torch.device) -> None:
    """The first call compiles; the second is counted."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            work()
            figure.peak_bytes = peak_bytes(work, device)
            if device.type == "cuda":
                torch.cuda.synchronize()  # errors of the kernel itself come here
        except Exception as error:  # a contender is somebody else's code: whatever it raises is its reason
            figure.reason = reason_of(error, warned)
    if figure.reason is not None:
        let_go(device)  # outside of the handler, where the error no longer holds the tensors


def _time(
    point: Point,
    ready: Sequence[tuple[Figure, Work]],
    sets: Sequence[Inputs],
    device: torch.device,
    rounds: int,
    tick: Tick,
) -> None:
    """The contenders, and the large matrix product with them."""
    matmul, point.ceiling_flops = matmul_of(sets[0][0].dtype, device)
    works = [work for _, work in ready]
    for i, seconds in interleaved([*works, matmul], stopwatch_of(device), rounds, _SAMPLE_SECONDS[device.type]):
        if i == len(ready):
            if not isinstance(seconds, Exception):
                point.ceiling_samples.append(seconds)
            continue
        figure = ready[i][0]
        if isinstance(seconds, Exception):
            figure.reason = reason_of(seconds)
            let_go(device)
        else:
            figure.samples.append(seconds)
        tick(f"{point.shape.name}, {figure.contender}")


def _time_graphs(ready: Sequence[tuple[Figure, Work]], sets: int, device: torch.device, rounds: int) -> None:
    """Forward once more as CUDA graphs, of all contenders, where a call of any is short."""
    forward = [(f, work) for f, work in ready if f.which == "forward" and f.seconds is not None]
    if not any(figure.seconds is not None and figure.seconds < _SHORT_CALL for figure, _ in forward):
        return
    calls = max(_CALLS_IN_A_GRAPH, sets)
    captured: list[tuple[Figure, Work]] = []
    for figure, work in forward:
        try:
            captured.append((figure, graph_of(work, calls)))
        except Exception as error:
            # Ending a broken capture raises once more; what broke it is the first error.
            first = error.__context__
            figure.graph_reason = reason_of(first if isinstance(first, Exception) else error)
    replays = [replay for _, replay in captured]
    for i, seconds in interleaved(replays, stopwatch_of(device), rounds, _SAMPLE_SECONDS[device.type]):
        figure = captured[i][0]
        if isinstance(seconds, Exception):
            figure.graph_reason = reason_of(seconds)
        else:
            figure.graph_samples.append(seconds / calls)
