"""A point of a grid: everything that says what is measured, before it is measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.cases.attention.blocks import Block
from assay.cases.attention.inputs import FROM_FILE, Shape, describe_inputs
from assay.cases.attention.plan import Plan

FLASH = "flash"
"""The variant that is our re-implementation of tiled attention; other variants are real kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One call of one variant on one draw of inputs, compared with golden and with a baseline."""

    sweep: str
    inputs: str
    shape: Shape
    seed: int
    format: str
    plan: Plan
    baseline: Plan
    causal: bool = False
    variant: str = FLASH
    tensor: str = "output"
    order: str | None = "fa1"
    block: Block | None = (50, 50)
    block_shape: str | None = "given"
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of `tiled_attention`."""
    keys: int | None = None
    """The length of the keys; None: that of the queries."""
    ladder: str | None = None
    role: str | None = None
    step: str | None = None
    path: int | None = None
    position: int | None = None

    @property
    def group(self) -> str:
        """Points of one group share their inputs, so golden is computed once for all of them."""
        return json.dumps([self.sweep, inputs_name(self.inputs), self.shape, self.causal, self.seed])

    def coordinates(self) -> dict[str, Any]:
        """The columns of a record that say what is measured."""
        batch, heads, length, dim = self.shape
        rows, columns = self.block or (None, None)
        plan = self.plan.as_dict()
        return {
            "case": "attention",
            "sweep": self.sweep,
            "variant": self.variant,
            "tensor": self.tensor,
            "inputs": inputs_name(self.inputs),
            "distribution": describe_inputs(self.inputs),
            "batch": batch,
            "heads": heads,
            "length": length,
            "keys": self.keys or length,
            "dim": dim,
            "causal": self.causal,
            "seed": self.seed,
            "format": self.format,
            "order": self.order,
            "block_rows": rows,
            "block_columns": columns,
            "block_shape": self.block_shape,
            "options": json.dumps(self.options, sort_keys=True),
            "baseline": self.baseline.name,
            "ladder": self.ladder,
            "role": self.role,
            "step": self.step,
            "path": self.path,
            "position": self.position,
            "plan": plan.pop("name"),
            **{f"plan_{name}": value for name, value in plan.items()},
        }

    def id(self, device: str) -> str:
        """The same for the same point on a device of the same name, in any process and at any time."""
        what = self.coordinates() | {"device": device, "baseline": self.baseline.as_dict()}
        del what["distribution"]  # words
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]


def inputs_name(inputs: str) -> str:
    """As a record has it: of a captured file its name and a hash of its bytes; its path means nothing elsewhere."""
    if not inputs.startswith(FROM_FILE):
        return inputs
    path = Path(inputs.removeprefix(FROM_FILE))
    return f"{FROM_FILE}{path.name}@{_content_hash(path, path.stat().st_mtime_ns)}"


@lru_cache(maxsize=32)
def _content_hash(path: Path, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]
