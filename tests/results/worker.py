"""A process that measures, for the tests that kill it and run several: claim a group, skip what is done, append.

`python -m tests.results.worker FOLDER GROUPS ROWS [PAUSE]`. It says "ready" and starts when it is sent a line.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from assay.results.store import Store
from tests.results.records import make_record


def identity(group: int, row: int) -> str:
    return f"{group}/{row}"


def work(folder: Path, groups: int, rows: int, pause: float) -> None:
    with Store(folder) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        while missing := [g for g in range(groups) if any(identity(g, r) not in store.done for r in range(rows))]:
            for group in missing:  # all processes in the same order, to meet as often as possible
                with store.claim(f"group {group}") as ours:
                    if not ours:
                        continue
                    store.refresh()
                    for row in range(rows):
                        if identity(group, row) not in store.done:
                            time.sleep(pause)
                            store.append(make_record(id=identity(group, row)))
            time.sleep(0.001)
            store.refresh()


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
