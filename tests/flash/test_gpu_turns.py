"""Several processes on one GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROCESSES, SECONDS, PATIENCE = 8, 10, 240
COMMAND = [sys.executable, "-m", "tests.flash.turns"]


def test_kernels_that_are_stopped_in_the_middle() -> None:
    """They go on where they were: the same numbers as alone, and none hangs."""
    subprocess.run([*COMMAND, "0"], check=True, timeout=PATIENCE)  # compiles
    each = [subprocess.Popen([*COMMAND, str(SECONDS)], stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    try:
        told = [process.communicate(timeout=PATIENCE)[0].split() for process in each]
    finally:
        for process in each:
            process.kill()
    assert [process.returncode for process in each] == PROCESSES * [0]
    assert all(int(runs) > 0 for runs, _ in told)
    assert [int(wrong) for _, wrong in told] == PROCESSES * [0]
