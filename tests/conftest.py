"""Settings of all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# The same examples every time where a red run must mean a change of ours; new ones at a developer's desk.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("desk", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

# Started in the background of a script, a process ignores Ctrl-C, and so would the ones that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
