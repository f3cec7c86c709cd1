"""Parts of the tests, for processes beside each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def collected(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_structure.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def names(*options: str) -> list[str]:
    return [line for line in collected(*options).stdout.splitlines() if "::" in line]


def test_every_test_is_in_one_part() -> None:
    parts = [names("--part", f"{i}/3") for i in (1, 2, 3)]
    assert all(parts)
    assert sorted(name for part in parts for name in part) == sorted(names())


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b"])
def test_no_such_part(part: str) -> None:
    done = collected("--part", part)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--part must be I/N with I from 1 to N" in done.stderr
