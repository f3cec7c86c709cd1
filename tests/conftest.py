"""Settings of all tests."""

from __future__ import annotations

import os
import re
import signal

import pytest
from hypothesis import settings

# The same examples every time where a red run must mean a change of ours; new ones at a developer's desk.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("desk", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

# Started in the background of a script, a process ignores Ctrl-C, and so would the ones that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="every N-th test, from the I-th on: for processes beside each other")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("--part")
    if asked is None:
        return
    found = re.fullmatch(r"(\d+)/(\d+)", asked)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--part must be I/N with I from 1 to N, got {asked!r}.")
    first, step = int(found[1]) - 1, int(found[2])
    kept = items[first::step]
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % step != first])
    items[:] = kept
