"""Clocks, and the order in which they are used.

Machines are noisy: another job, a clock that falls with the heat. So everything that is compared is timed in turn,
round after round, and the median of the rounds counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

Work = Callable[[], object]
"""One call of what is timed."""
Stopwatch = Callable[[Work, int], float]
"""(work, calls) → seconds of one call, over so many in a row."""

_MOST_CALLS = 200


def host_clock(work: Work, calls: int) -> float:
    """For the CPU, where a call has ended when it returns: the median, as another job stalls some calls for long."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cuda_clock(work: Work, calls: int) -> float:
    """Calls queued between two events of the GPU's own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The clock of `device`."""
    return cuda_clock if device.type == "cuda" else host_clock


def in_turn(count: int, turn: int) -> list[int]:
    """Everybody in the order of this round. Each runs after each other equally often (a Williams design).

    What ran before leaves the machine hot or cool and its cache full, and the next one may pay for that. An even number
    needs as many rounds for it, an odd one twice as many.
    """
    zigzag = [count - 1 - i // 2 if i % 2 else i // 2 for i in range(count)]
    order = [(i + turn) % count for i in zigzag]
    return order[::-1] if count % 2 and turn % 2 else order


def interleaved(
    works: Sequence[Work], stopwatch: Stopwatch, rounds: int, sample_seconds: float
) -> Iterator[tuple[int, float | Exception]]:
    """(which, seconds of one call): every work once a round, in an order that changes (`in_turn`).

    As many calls make a sample as take about `sample_seconds`. A work that fails gives its error and is left out
    from then on: what remains is still worth its time.
    """
    calls: dict[int, int] = {}
    failed: set[int] = set()
    for turn in range(rounds):
        for i in in_turn(len(works), turn):
            if i in failed:
                continue
            seconds = _attempt(stopwatch, works[i], calls.get(i, 1))
            if turn == 0 and not isinstance(seconds, Exception):
                calls[i] = _calls_for(sample_seconds, seconds)
                if calls[i] > 1:  # of a long call, the first is a sample already
                    seconds = _attempt(stopwatch, works[i], calls[i])
            if isinstance(seconds, Exception):
                failed.add(i)
            yield i, seconds


def _calls_for(sample_seconds: float, seconds: float) -> int:
    return min(_MOST_CALLS, max(1, round(sample_seconds / max(seconds, 1e-9))))


def _attempt(stopwatch: Stopwatch, work: Work, calls: int) -> float | Exception:
    try:
        return stopwatch(work, calls)
    except Exception as error:
        return error.with_traceback(None)  # whose frames would keep the tensors alive
