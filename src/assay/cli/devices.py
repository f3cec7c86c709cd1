"""The device that a command runs on."""

from __future__ import annotations

import torch


def find_device(name: str) -> str:
    """The device called `name`; "auto" is cuda where there is one, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in here and not (name == "cuda" and len(here) > 1):
        raise ValueError(f"This machine has no device {name!r}. It has: {', '.join(here)}; or leave --device out.")
    return name
