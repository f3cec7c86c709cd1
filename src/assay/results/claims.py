"""Who measures what: claims between processes that share a folder, which end with the process that holds them.

A claim is a POSIX lock on one byte of the file `.claims`; the byte's place is a hash of the claim's kind and name. The
kernel releases the locks of a process that dies, however it dies: nothing is left to clean up after kill -9.

Such locks have two traps. Closing any descriptor of the file drops all locks that the process has on it, so there is
one descriptor a folder and process, kept to the end of the process. And a process's locks do not exclude the process
itself, so what it holds is remembered here.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl

# A forked child has its parent's descriptors but none of its locks, hence the process id: (pid, device, inode).
File = tuple[int, int, int]
Claim = tuple[File, int]
"""A byte of a file of claims."""

_descriptors: dict[File, int] = {}
_held: set[Claim] = set()


def acquire(folder: Path, kind: str, name: str, wait: bool) -> Claim | None:
    """Claim `name`, one of `kind`, in `folder`; None where another has it. With `wait`, wait until the other ends.

    Not between threads: they share their process's claims. Without POSIX locks (Windows) nobody else ever has it, so
    that only one process may work in a folder. An OSError says that the file system has no locks, or that two
    processes wait for each other.
    """
    place = int.from_bytes(hashlib.sha256(f"{kind}: {name}".encode("utf-8", "surrogatepass")).digest()[:6], "big")
    if sys.platform == "win32":
        return (os.getpid(), 0, 0), place
    file = _open(folder / ".claims")
    if (file, place) in _held:
        if wait:
            raise ValueError(f"A claim is taken once at a time, and this process holds {name!r} already. Release it.")
        return None
    try:
        fcntl.lockf(_descriptors[file], fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:
        if not wait and error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        raise
    _held.add((file, place))
    return file, place


def release(claim: Claim) -> None:
    """Let others have it."""
    file, place = claim
    _held.discard(claim)
    # Not in a child that was forked in between: the lock is its parent's.
    if sys.platform != "win32" and file[0] == os.getpid():
        fcntl.lockf(_descriptors[file], fcntl.LOCK_UN, 1, place)


def _open(path: Path) -> File:
    """The file's key in `_descriptors`; opened once, see above."""
    try:
        found = path.stat()
        key = (os.getpid(), found.st_dev, found.st_ino)
        if key in _descriptors:
            return key
    except FileNotFoundError:
        pass
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    made = os.fstat(descriptor)
    key = (os.getpid(), made.st_dev, made.st_ino)
    _descriptors[key] = descriptor
    return key
