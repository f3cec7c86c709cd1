"""What a row was measured with: code, device, host and versions."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from assay._version import __version__

_PACKAGE = Path(__file__).resolve().parents[1]


def environment(device: str) -> dict[str, Any]:
    """The columns of a record that say what it was measured with; `device` is "cpu", "cuda" or "cuda:1"."""
    import numpy
    import torch

    return {
        "code": code_version(),
        "device": _device_name(device),
        "host_cpu": _host_cpu(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which a record refuses
        "numpy": numpy.__version__,
        "triton": _triton_version(),
    }


@functools.cache
def code_version(package: Path = _PACKAGE) -> str:
    """The version; in a git checkout also the commit, and ".dirty" where a file of the package differs from it.

    Looked up once a process: a commit made while it runs does not change the code that it runs.
    """
    # An installed copy may lie inside somebody else's checkout (a .venv does). Git does not track it there.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return __version__
    commit = _git(package, "rev-parse", "--short", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:
        return __version__
    return f"{__version__}+g{commit}{'.dirty' if changes else ''}"


def _git(folder: Path, *arguments: str) -> str | None:
    """Git's answer; None without git, outside a checkout, or where git refuses."""
    # Inside a git hook GIT_DIR and others point at a repository that need not be this one.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=clean)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _device_name(device: str) -> str:
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        return "CPU"
    if kind == "cuda":
        return str(torch.cuda.get_device_name(device))
    raise ValueError(f'Assay measures on "cpu" and "cuda", got device {device!r}. Choose one of them.')


@functools.cache
def _host_cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


@functools.cache
def _triton_version() -> str | None:
    """From the installed package's own data: importing Triton takes most of a second."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
