"""Start workers, and judge by the bytes in the folder what they left there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from assay.results.record import from_json

ROOT = Path(__file__).parents[2]


def start(*command: str) -> subprocess.Popen[str]:
    """A Python process in the repository's root that has said its first line."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def worker(folder: Path, groups: int, rows: int, pause: float = 0.0) -> subprocess.Popen[str]:
    return start("-m", "tests.results.worker", str(folder), str(groups), str(rows), str(pause))


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> int:
    """Wait for its end; the exit status."""
    process.communicate(timeout=60)
    return process.returncode


def ids_on_disk(folder: Path) -> list[str]:
    """Ids of the whole lines, each of which must be a record; read without the store and without DuckDB."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        *whole, _ = path.read_bytes().split(b"\n")
        found += [from_json(line.decode())["id"] for line in whole]
    return found
