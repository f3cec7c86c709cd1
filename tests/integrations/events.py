"""What loggers have written, read back from their files."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _MAGIC = 1 << 15, 7, 7


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → (step, value), by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the offline run in a folder, once it has ended: W&B's process writes on after `finish`."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(100):
        found = list(_wandb_records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"{path} did not end within 10 s.")
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in items.items() if not name.startswith("_")})
    return rows


def _wandb_records(path: Path) -> Iterator[Any]:
    """Protocol buffers in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2 as messages

    for data in _records(path.read_bytes()):
        record = messages.Record()  # type: ignore[attr-defined]  # made while it is imported
        record.ParseFromString(data)
        yield record


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = _MAGIC, []
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + _HEADER : at + _HEADER + length])
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []
