"""The worst call seen, kept with its q, k and v so that it can be replayed."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from assay.results.record import Record
from assay.watching.others import Call


class Worst:
    """The call whose output has the largest error over the other's; its tensors are copied, on the CPU."""

    def __init__(self) -> None:
        self.row: Record | None = None
        self._tensors: dict[str, Tensor] = {}
        self._notes: dict[str, str] = {}

    def offer(self, row: Record, call: Call) -> None:
        """Keep it if it is worse."""
        if row["tensor"] != "output" or _badness(row) <= _badness(self.row):
            return
        self.row = row
        self._tensors = {name: x.detach().cpu().contiguous() for name, x in call.tensors().items()}
        self._notes = {"layer": row["layer"], "implementation": row["implementation"], "causal": str(row["causal"])}

    def save(self, path: Path | str) -> None:
        """As safetensors: q, k and v, which `assay sweep inputs` takes."""
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
    found = row["ratio_rmse"] if row["ratio_rmse"] is not None else row["difference_rmse"]
    return float("inf") if found != found else float(found)
