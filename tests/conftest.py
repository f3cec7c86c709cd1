"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# The same examples every time where a red run must mean a change of ours; new ones at a developer's desk.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("desk", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")
