"""Trains `small.control_study` into a folder and kills itself with kill -9, in one of two places.

"between saves": after the save at step 2, when step 5 is half done. "in a save": a checkpoint is written, and not yet
in its place.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from assay.models.text_to_image import text_to_image_sizes
from assay.training import checkpoints, session
from tests.training import small


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def between_saves(done: int, words: str) -> None:
    trainings = 5
    session.SAVE_EVERY = 0.0 if trainings < done <= 2 * trainings else 1e9
    if done == 4 * trainings + 3:
        die()


def in_a_save(done: int, words: str) -> None:
    session.SAVE_EVERY = 0.0
    checkpoints.os.replace = lambda *paths: die()  # type: ignore[attr-defined]


if __name__ == "__main__":
    folder, place = sys.argv[1:]
    torch.set_num_threads(1)
    text_to_image_sizes["dot"] = small.IMAGES
    tell = {"between saves": between_saves, "in a save": in_a_save}[place]
    session.run_pairs(small.control_study(), Path(folder), "cpu", tell=tell)
