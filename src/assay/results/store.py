"""The folder of a run is its database: append-only JSON lines, one file a process.

Nobody but its process ever writes a file, and each row is one write at its end. A process that is killed can therefore
lose or cut only the row that it was writing; a row is whole exactly when its line has its end. What is there is done,
which makes resuming, and working beside other processes, a matter of reading the folder.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import platform
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from assay.results import claims
from assay.results.record import POINTS
from assay.results.schema import Record, Schema


class StoreError(Exception):
    """Rows cannot be kept: the rule, what came, and what to do."""


class Store:
    """The records of one kind in a folder, which may hold other kinds too.

    For one thread of a process; a forked child that goes on gets its own file. Rows that nobody resumes need not be
    remembered: then `done` stays empty, and memory does not grow with them.
    """

    def __init__(self, folder: Path, schema: Schema = POINTS, *, remembers: bool = True) -> None:
        self.folder = Path(folder).absolute()
        self.schema = schema
        _check_writable(self.folder)
        self._done: set[str] = set()
        self._read: dict[str, tuple[int, int]] = {}  # file → bytes read as whole lines, size at the last look
        self._path: Path | None = None
        self._descriptor = -1
        self._process = os.getpid()
        self._remembers = remembers
        if remembers:
            self.refresh()

    @property
    def done(self) -> set[str]:
        """Ids of its whole records in the folder, as of the last `refresh`. The store's own set: do not change it."""
        return self._done

    def refresh(self) -> set[str]:
        """Read what was appended since the last look, by any process; the ids that are new.

        A last line without its end is left for the next look: it may be half of a write. Lines that are no records
        are passed over; the reader reports them.
        """
        found: set[str] = set()
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if (entry.name in self._read or self._holds_rows(entry.name)) and entry.is_file():
                        found |= self._refresh_file(entry.name, entry.stat().st_size)
        except OSError as error:
            raise StoreError(
                f"The records in {self.folder} must be readable to know what is done, but: {error}. "
                "Make them readable, or choose another folder."
            ) from error
        found -= self._done
        self._done |= found
        return found

    def append(self, record: Record) -> None:
        """Keep one row: afterwards it is whole in the folder, or a StoreError says why not and earlier rows are.

        It survives the end of the process, not of the machine: nothing is synced, a row lost is measured again.
        """
        line = self.schema.to_json(record).encode() + b"\n"
        identity: str = record["id"]
        if identity in self._done:
            raise ValueError(f"No row is kept twice, and {identity!r} is done. Look into `done` before measuring.")
        descriptor, path = self._own_file()
        before = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"only {written} of a row's {len(line)} bytes could be written")
            if self._remembers:
                self._done.add(identity)
        except BaseException as error:  # also Ctrl-C: half a row would spoil the next one
            self._done.discard(identity)
            self._cut(before)
            if isinstance(error, OSError):
                raise StoreError(
                    f"A row must be written whole, but {path}: {error}. All rows before it are "
                    "kept. Make room, or make the folder writable, and start again: it goes on where it stopped."
                ) from error
            raise
        self._read[path.name] = (before + len(line), before + len(line))

    @contextlib.contextmanager
    def claim(self, name: str, wait: bool = False) -> Iterator[bool]:
        """Claim a group of rows while it is measured: False if another process of this folder has it.

        `refresh` after a claim was won: the other may have measured the group just before. With `wait`, wait for the
        other to end. The claim of a process that dies is free at once. See `claims`.
        """
        try:
            held = claims.acquire(self.folder, self.schema.stem, name, wait)
        except OSError as error:
            raise StoreError(
                f"Processes that share a folder need POSIX locks, but {self.folder / '.claims'}: {error}. "
                "Use a folder on a local disk, or only one process for each folder."
            ) from error
        try:
            yield held is not None
        finally:
            if held is not None:
                claims.release(held)

    def close(self) -> None:
        """Close the store's file. Rows are on their way to the disk already: nothing is lost without it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._path = -1, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _holds_rows(self, name: str) -> bool:
        return name.endswith(".jsonl") and self.schema.owns(name)

    def _refresh_file(self, name: str, size: int) -> set[str]:
        start, seen = self._read.get(name, (0, 0))
        if size == seen:
            return set()
        if size < start:  # somebody rewrote it
            start = 0
        found = set()
        with open(self.folder / name, "rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start += len(line)
                identity = self.schema.id_of(line)
                if identity is not None:
                    found.add(identity)
        self._read[name] = (start, max(size, start))
        return found

    def _own_file(self) -> tuple[int, Path]:
        if self._process != os.getpid():  # forked: the file is the parent's, one file has one writer
            self.close()
            self._process = os.getpid()
        if self._path is not None and os.fstat(self._descriptor).st_nlink == 0:  # deleted: rows would go nowhere
            self.close()
        if self._path is None:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
            host = re.sub(r"[^A-Za-z0-9]+", "-", platform.node())[:40].strip("-") or "host"
            path = self.folder / f"{self.schema.stem}-{now}-{host}-{os.getpid()}-{secrets.token_hex(2)}.jsonl"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
            try:
                self._descriptor = os.open(path, flags, 0o666)
            except OSError as error:
                raise StoreError(
                    f"A run's folder must take a file for its rows, but {path}: {error}. "
                    "Make the folder writable, or choose another one."
                ) from error
            self._path = path
        return self._descriptor, self._path

    def _cut(self, length: int) -> None:
        """Take half a row away again. Where even that fails the file is left alone: the next row gets a new one."""
        try:
            os.ftruncate(self._descriptor, length)
        except OSError:
            self.close()


def _check_writable(folder: Path) -> None:
    """Make the folder and write into it, before anything is measured. The file has no name or loses it at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise StoreError(
            f"The results need a folder that can be written to, but {folder}: {error.strerror or error}. "
            "Choose another folder, or make room or change the permissions of this one."
        ) from error
