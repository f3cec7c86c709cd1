"""Who is timed: our kernel, every other one of this machine, and standard attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from assay.bench.standard import standard_attention
from assay.cases.attention.kernels import Attention, available_kernels
from assay.flash.attention import flash_attention

OURS = "assay"
STANDARD = "standard"
_NO_GROUPS = ("SDPA efficient",)
"""Kernels of this machine that need as many KV heads as heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Something that computes attention."""

    name: str
    """As tables show it."""
    call: Attention
    """(q, k, v, causal) → output."""
    flash: bool
    """Whether it never writes the matrix of scores out."""
    takes_groups: bool
    """Whether K and V may have fewer heads than Q; else they are repeated, within the time."""
    score_bytes: int = 0
    """The least size of an element of its matrix of scores; 0: it has none."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        """The output; K and V are repeated first for a contender that needs it, as model code does."""
        group = q.shape[1] // k.shape[1]
        if group > 1 and not self.takes_groups:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return self.call(q, k, v, causal)


def find_contenders(device: torch.device, only: Sequence[str] = ()) -> list[Contender]:
    """All that run on `device`, ours first and standard attention last; with `only`, those whose names hold one."""
    everyone = [
        Contender(name=OURS, call=_ours, flash=True, takes_groups=True),
        *_kernels(device),
        Contender(name=STANDARD, call=standard_attention, flash=False, takes_groups=False, score_bytes=1),
    ]
    for part in only:
        if not part or not any(part.lower() in contender.name.lower() for contender in everyone):
            names = ", ".join(contender.name for contender in everyone)
            raise ValueError(f"--only takes (a part of) the name of a contender, got {part!r}. Here are: {names}.")
    return [c for c in everyone if not only or any(part.lower() in c.name.lower() for part in only)]


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return flash_attention(q, k, v, causal=causal)


def _kernels(device: torch.device) -> list[Contender]:
    return [
        Contender(
            name=kernel.name,
            call=kernel.call,
            flash=kernel.tiling is not None,
            takes_groups=kernel.name not in _NO_GROUPS,
            score_bytes=0 if kernel.tiling is not None else 4,  # SDPA's math computes in FP32
        )
        for kernel in available_kernels(device)
        if not kernel.name.startswith(OURS)  # ours is in the list already
    ]
