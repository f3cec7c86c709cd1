from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_compute_attention() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.flash.interpreted_attention"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "43 cases, 4 layouts, 7 knobs"
