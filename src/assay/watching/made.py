"""A call that was made, and its comparison on the way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from assay.watching.clock import Moment
from assay.watching.comparing import Comparing
from assay.watching.others import Call
from assay.watching.part import Part
from assay.watching.rows import Seen


@dataclass(frozen=True, eq=False, slots=True)
class Made:
    """A call that was made."""

    seen: Seen
    call: Call
    output: Tensor
    number: int
    """Of all that happened."""
    part: Part | None = None
    """What `call` and `output` have of it; None: all."""

    def own(self, x: Tensor) -> Tensor:
        """Of a gradient of the whole call, what is compared."""
        return x if self.part is None else self.part.own(x)


@dataclass(frozen=True, eq=False, slots=True)
class UnderWay:
    """A comparison that the device has been told to make."""

    one: Made
    numbers: tuple[int, ...]
    """Of its output and of its gradients among all that happened, or of one of the two."""
    comparing: Comparing
    began: Moment
    ended: Moment
    tensors: dict[str, Tensor]
    """What it takes to replay it, as it was then; of several sequences, the worst."""
    notes: dict[str, str]
    """The numbers that belong to them."""
