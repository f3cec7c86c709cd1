"""From a call that is launched again the driver is told what Triton told it, with this Triton's own launchers.

Without a GPU: they run on a libcuda of ours, which notes every launch, byte by byte.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.flash.test_hopper_compiles import CASES

MASKED = {*CASES, *(f"{name}, backward" for name in CASES)}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_same_bytes(tmp_path: Path, architecture: int) -> None:
    command = [sys.executable, "-m", "tests.flash.driver_without_gpu", str(tmp_path), str(architecture)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert told.keys() == {*MASKED, "decoding", "decoding, paged"}
    for name, each in told.items():
        assert each["launched"], name
        assert any("hopper" in kernel for kernel in each["launched"]) == (architecture == 90 and name in MASKED), name
        assert each == {**each, "again": 1, "kept": True, "same": True}, name
