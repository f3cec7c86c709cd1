"""Triton's interpreter, in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpret(module: str) -> None:
    """Run a module of the tests there; skipped without Triton."""
    pytest.importorskip("triton")
    subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )
