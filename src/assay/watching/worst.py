"""The worst call seen, kept with its q, k and v so that it can be replayed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from assay.results.record import Record
from assay.results.watched import badness, compared


class Worst:
    """The call whose output has the largest error over the other's, as a whole or in one head.

    Its tensors are copied, where they are: to bring them to the CPU each time would keep a GPU waiting.
    """

    def __init__(self) -> None:
        self.row: Record | None = None
        """Of the whole call, or of the head that is worse."""
        self._tensors: dict[str, Tensor] = {}
        self._notes: dict[str, str] = {}

    def offer(self, rows: Sequence[Record], tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
        """Keep what it takes to replay the call of these rows, which are its output's, if it is worse."""
        row = compared(rows)[0].worst
        if self.row is not None and badness(row) <= badness(self.row):
            return
        self.row = row
        # Copies: a model may write into its own tensors later, and a file may not have one tensor under two names.
        self._tensors = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        self._notes = {"layer": row["layer"], "implementation": row["implementation"], **notes}

    def save(self, path: Path | str) -> None:
        """As safetensors: q, k, v, its mask and scale, for `assay sweep inputs --from`."""
        if self.row is None:
            raise ValueError("No call was compared, so there is none to save.")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        save_file({name: x.cpu() for name, x in self._tensors.items()}, new, metadata=self._notes)
        os.replace(new, path)
