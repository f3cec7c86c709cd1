"""Pictures of what was learnt: read back by Pillow, which nobody here wrote."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from assay.training.run import Run
from assay.training.samples import ACROSS, COUNT, SCALE, grid, png, save_samples
from assay.training.tasks import find_task
from assay.training.training import Training


def pixels(content: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(content)) as image:
        assert image.mode == "RGB"
        return torch.tensor(list(image.tobytes()), dtype=torch.uint8).reshape(image.height, image.width, 3)


def test_png_is_read_back() -> None:
    picture = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pixels(png(picture)), picture)


def test_grid_places_and_scales() -> None:
    images = torch.full((ACROSS + 1, 3, 2, 2), -1.0)
    images[1, 0] = 1.0  # the second is red
    images[2] = torch.nan
    found = grid(images)
    side = 2 * SCALE
    assert found.shape == (2 * side, ACROSS * side, 3)
    assert (found[:side, :side] == 0).all()
    assert (found[:side, side : 2 * side] == torch.tensor([255, 0, 0])).all()
    assert (found[:side, 2 * side : 3 * side] == 128).all()
    assert (found[side:, side:] == 255).all()  # nothing there


@pytest.mark.parametrize("task", ["text_to_image", "gpt"])
def test_samples_are_saved_and_the_weights_come_back(task: str, tmp_path: Path) -> None:
    training = Training(task=task, size="300k", data="synthetic", steps=2, batch=2, image=16, context=32)
    run = Run(training, find_task(training), torch.device("cpu"))
    run.advance()
    before = [p.detach().clone() for p in run.model.parameters()]
    for _ in range(2):  # again: replaced, not added
        save_samples(tmp_path, {"one": run}, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    if task == "gpt":
        assert list(tmp_path.iterdir()) == []
        return
    (entry,) = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))
    assert 1 <= len(entry["captions"]) <= COUNT
    assert entry["title"] == "one, seed 3, 1 steps"
    assert pixels((tmp_path / entry["file"]).read_bytes()).shape[1] == ACROSS * 16 * SCALE
