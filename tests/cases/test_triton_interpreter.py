from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_fused_kernels_do_what_the_torch_path_does() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.cases.interpreted_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "120 tensors agree"
