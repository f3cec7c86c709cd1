"""TensorBoard events of a study: the curves of every training and every pair, as they are measured."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.results.record import Record

_UNSAFE = re.compile(r"^\.|[^\w ,.↔-]")
_OF_RUN = {
    "loss": "loss",
    "held_out": "held-out loss",
    "grad_norm": "gradient norm",
    "scale": "loss scale",
    "skipped": "skipped steps",
}
_OF_PAIR = {
    "w1": "W1",
    "max": "largest difference",
    "relative_rmse": "RMS over spread",
    "relative_w1": "W1 over spread",
}


class Events:
    """Written into a folder of their own for each training and pair of a seed: TensorBoard shows them by that name."""

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ValueError("TensorBoard is not installed: pip install 'assay[tensorboard]'.")
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def add(self, row: Record) -> None:
        """What a row says of a training, or of a pair as a whole; nothing of single layers."""
        if row["layer"]:
            return
        of_run = row["pair"] is None
        name = row["arm"] if of_run else f"pair {row['pair']}"
        writer = self._writer(f"seed-{row['seed']}", name)
        prefix = "" if of_run else f"{row['kind']}/"
        for column, tag in (_OF_RUN if of_run else _OF_PAIR).items():
            if row[column] is not None:
                writer.add_scalar(prefix + tag, row[column], row["step"])

    def flush(self) -> None:
        """All that was added is on the disk."""
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, seed: str, name: str) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        place = f"{seed}/{_UNSAFE.sub('_', name)}"
        if place not in self._writers:
            self._writers[place] = SummaryWriter(str(self._folder / place))
        return self._writers[place]
