"""What a text-to-image model paints for captions it was not trained on: a grid of images as a PNG file."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from assay._files import write_whole
from assay.training.run import Run
from assay.training.snapshots import safe_name
from assay.training.tasks import TextToImageTask

COUNT, ACROSS, SCALE = 16, 8, 2
"""Images of a grid, those of a row, and pixels for one of theirs."""
MOST = 4
"""Trainings that are shown."""


def save_samples(folder: Path, runs: dict[str, Run], seed: int) -> None:
    """A grid for each of the first, by the average of its weights, and whose images they learnt from; none for text."""
    entries = _known(folder)
    for name, run in list(runs.items())[:MOST]:
        if isinstance(run.task, TextToImageTask):
            title = f"{name}, seed {seed}, {run.step} steps"
            file = f"seed-{seed}-{safe_name(name)}.png"
            captions, images = _painted(run, run.task)
            write_whole(folder / file, png(grid(images)))
            entries = [entry for entry in entries if entry["file"] != file]
            entries.append({"file": file, "title": title, "captions": captions, "attribution": run.task.attribution})
    if entries:
        write_whole(folder / "samples.json", json.dumps(entries, ensure_ascii=False).encode())


@torch.no_grad()
def _painted(run: Run, task: TextToImageTask) -> tuple[list[str], Tensor]:
    """With the average in the place of the weights, which come back afterwards."""
    parameters = dict(run.model.named_parameters())
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    for name, p in parameters.items():
        p.copy_(run.average[name])
    try:
        return task.samples(run.model, COUNT, run.device)
    finally:
        for name, p in parameters.items():
            p.copy_(kept[name])


def grid(images: Tensor) -> Tensor:
    """(count, 3, S, S) from −1 to 1 → one picture (height, width, 3) uint8; what is not finite is grey."""
    pixels = ((images.float().nan_to_num(0.0).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    rows = -(-len(pixels) // ACROSS)
    full = torch.full((rows * ACROSS, *pixels.shape[1:]), 255, dtype=torch.uint8)
    full[: len(pixels)] = pixels
    full = full.repeat_interleave(SCALE, 2).repeat_interleave(SCALE, 3)
    _, channels, height, width = full.shape
    tiled = full.reshape(rows, ACROSS, channels, height, width).permute(0, 3, 1, 4, 2)
    return tiled.reshape(rows * height, ACROSS * width, channels)


def png(picture: Tensor) -> bytes:
    """A picture (height, width, 3) uint8 as a PNG file."""
    height, width, _ = picture.shape
    lines = torch.cat((torch.zeros(height, 1, dtype=torch.uint8), picture.reshape(height, -1)), 1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.numpy().tobytes(), 9)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _known(folder: Path) -> list[dict[str, object]]:
    try:
        found: list[dict[str, object]] = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return []
