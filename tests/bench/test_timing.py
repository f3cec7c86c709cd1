from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from assay.bench.timing import Stopwatch, Work, host_clock, in_turn, interleaved


class FakeMachine:
    """Works that take a known time, and a clock that notes who was asked, and for how many calls."""

    def __init__(self, seconds: list[float]) -> None:
        self.asked: list[tuple[int, int]] = []
        self.now = 0.0
        self.works = [self._work(i, each) for i, each in enumerate(seconds)]
        self.running = -1

    def _work(self, i: int, seconds: float) -> Work:
        def work() -> None:
            self.running = i
            self.now += seconds

        return work

    def clock(self, work: Work, calls: int) -> float:
        start = self.now
        for _ in range(calls):
            work()
        self.asked.append((self.running, calls))
        return (self.now - start) / calls


@pytest.mark.parametrize("count", range(1, 9))
def test_each_follows_each_other_equally_often(count: int) -> None:
    rounds = [in_turn(count, turn) for turn in range(count if count % 2 == 0 else 2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    places = Counter((place, i) for order in rounds for place, i in enumerate(order))
    follows = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(places) == count**2
    assert len(set(places.values())) == 1
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) <= 1


def test_all_take_turns() -> None:
    machine = FakeMachine([2.0, 3.0, 5.0])
    found = list(interleaved(machine.works, machine.clock, 3, 1.0))
    assert [i for i, _ in found] == in_turn(3, 0) + in_turn(3, 1) + in_turn(3, 2)
    assert {i: {s for j, s in found if i == j} for i in range(3)} == {0: {2.0}, 1: {3.0}, 2: {5.0}}
    assert {calls for _, calls in machine.asked} == {1}  # a long call is a sample as it is


def test_short_calls_are_repeated_until_they_fill_a_sample() -> None:
    machine = FakeMachine([0.125, 4.0])
    assert len(list(interleaved(machine.works, machine.clock, 2, 1.0))) == 4
    assert machine.asked == [(0, 1), (0, 8), (1, 1), (1, 1), (0, 8)]


def test_calls_are_limited_even_if_the_clock_stands() -> None:
    machine = FakeMachine([0.0])
    assert [s for _, s in interleaved(machine.works, machine.clock, 1, 1.0)] == [0.0]
    assert machine.asked == [(0, 1), (0, 200)]


def failing_at(machine: FakeMachine, work: int, sample: int) -> Stopwatch:
    def clock(it: Work, calls: int) -> float:
        seconds = machine.clock(it, calls)
        if [i for i, _ in machine.asked].count(work) == sample and machine.asked[-1][0] == work:
            raise RuntimeError("out of memory")
        return seconds

    return clock


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    for sample, expected in ((1, 0), (2, 1)):
        machine = FakeMachine([2.0, 3.0])
        found = list(interleaved(machine.works, failing_at(machine, 1, sample), 3, 1.0))
        assert [i for i, s in found if isinstance(s, float)].count(0) == 3
        assert [i for i, s in found if isinstance(s, float)].count(1) == expected
        assert [str(s) for _, s in found if isinstance(s, Exception)] == ["out of memory"]


def test_host_clock_takes_the_median_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    took = iter((1.0, 100.0, 2.0))

    def work() -> None:
        nonlocal now
        now += next(took)

    monkeypatch.setattr("assay.bench.timing.time.perf_counter", lambda: now)
    assert host_clock(work, 3) == 2.0
