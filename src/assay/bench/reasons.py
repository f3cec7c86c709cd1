"""Why a contender does not run a shape, in one line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

_NOISE = ("not used because", "runtime disabled", "runtime disable")
"""torch warns about every backend of SDPA; these lines say nothing about the one that was asked for."""
_LONGEST = 160


def reason_of(error: Exception, warned: Iterable[warnings.WarningMessage] = ()) -> str:
    """The error's text; SDPA's "No available kernel" is explained by the warnings before it."""
    text = str(error).strip()
    if "out of memory" in text or "allocate memory" in text or isinstance(error, MemoryError):
        return "ran out of memory"
    if "No available kernel" in text:
        told = [str(warning.message) for warning in warned]
        useful = [line for line in told if not any(noise in line for noise in _NOISE)]
        text = useful[0] if useful else "refused by torch"
    text = re.split(r"\(Triggered internally|\nException raised|\n", text, maxsplit=1)[0].strip()
    if not text:
        return type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
