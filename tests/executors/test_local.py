"""Tasks in this process and in others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from assay.executors.local import cores, run_tasks


def square(x: int) -> tuple[int, int]:
    return x * x, os.getpid()


def fail(x: int) -> int:
    raise ValueError(f"no {x}")


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_once(jobs: int) -> None:
    found = dict(run_tasks(square, range(20), jobs))
    assert {x: value for x, (value, _) in found.items()} == {x: x * x for x in range(20)}
    here = {process for _, process in found.values()} == {os.getpid()}
    assert here == (jobs == 1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_is_the_callers(jobs: int) -> None:
    with pytest.raises(ValueError, match="no "):
        list(run_tasks(fail, range(3), jobs))


def test_cores() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


PARENT = """
import time
from tests.executors.test_local import wait_long
from assay.executors.local import run_tasks
for _ in run_tasks(wait_long, [0, 1], 2): pass
"""


def wait_long(x: int) -> None:
    os.write(1, f"{os.getpid()}\n".encode())  # at once: two workers write to one pipe
    time.sleep(600)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(kill: signal.Signals) -> None:
    program = f"if __name__ == '__main__':\n{_indented(PARENT)}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        try:
            workers = [int(parent.stdout.readline()) for _ in range(2)]
            parent.send_signal(kill)
            parent.wait(timeout=30)
        finally:
            parent.kill()
    deadline = time.monotonic() + 30
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, workers))


def _alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().split()[2] != "Z"
    except OSError:
        return False


def _indented(program: str) -> str:
    return "".join(f"    {line}\n" for line in program.strip().splitlines())
