"""The worst call seen, kept with its q, k and v so that it can be replayed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from assay.results.record import Record


class Worst:
    """The call whose output has the largest error over the other's; its tensors are copied, on the CPU."""

    def __init__(self) -> None:
        self.row: Record | None = None
        self._tensors: dict[str, Tensor] = {}
        self._notes: dict[str, str] = {}

    def offer(self, row: Record, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
        """Keep what it takes to replay the call of this row, if it is worse."""
        if row["tensor"] != "output" or _badness(row) <= _badness(self.row):
            return
        self.row = row
        # Copies: a model may write into its own tensors later, and a file may not have one tensor under two names.
        self._tensors = {
            name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()
        }
        self._notes = {"layer": row["layer"], "implementation": row["implementation"], **notes}

    def save(self, path: Path | str) -> None:
        """As safetensors: q, k, v, its mask and scale, for `assay sweep inputs --from`."""
        if self.row is None:
            raise ValueError("No call was compared, so there is none to save.")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        save_file(self._tensors, new, metadata=self._notes)
        os.replace(new, path)


def _badness(row: Record | None) -> float:
    if row is None:
        return -1.0
    if row["ratio_rmse"] is None:
        wrong, found = row["difference_max"] == float("inf"), row["difference_rmse"]
    else:
        wrong, found = row["error_nonfinite"] > 0, row["ratio_rmse"]
    return float("inf") if wrong or found != found else float(found)
