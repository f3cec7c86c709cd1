"""What somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "Did you mean a or b? " where some of the known names are near, else nothing; for the middle of an error."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"Did you mean {' or '.join(near)}? " if near else ""
