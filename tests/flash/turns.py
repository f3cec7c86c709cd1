"""One of several processes that take turns at a GPU: `python -m tests.flash.turns SECONDS`.

The GPU stops kernels in the middle to let another process have its turn, but only those of a queue that is full: calls
in a row, nothing read in between. More tiles than processors, so that CTAs claim further ones. Prints how many calls
there were, and how many gave other numbers than the first.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from assay import flash_attention

LENGTH, HIDDEN, TOKENS, BURST = 1024, 2048, 16384, 12
KINDS: tuple[tuple[int, dict[str, Any]], ...] = (
    (64, {}),
    (64, {"deterministic": True}),
    (128, {}),
    (128, {"packed": True}),
    (128, {"fp8": True}),
    (256, {}),
)
"""D, and how."""
ULP = 2.0**-7
"""Of bf16: sums of dQ that are added up in another order may round to the next number."""


class Calls:
    """Of one kind: what the first gave, and how far others are from it."""

    def __init__(self, dim: int, how: dict[str, Any], device: str = "cuda", tokens: int = TOKENS) -> None:
        generator = torch.Generator(device).manual_seed(dim)
        packed, self.how = how.get("packed", False), {name: x for name, x in how.items() if name != "packed"}
        shape = (1 if packed else tokens // LENGTH, HIDDEN // dim, tokens if packed else LENGTH, dim)
        drawn = [torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(4)]
        self.inputs, self.dout = [x.requires_grad_("fp8" not in how) for x in drawn[:3]], drawn[3]
        if packed:
            self.how["cu_seqlens_q"] = torch.arange(0, tokens + 1, LENGTH, device=device, dtype=torch.int32)
        self.first = self.run()

    def run(self) -> list[torch.Tensor]:
        out = flash_attention(*self.inputs, causal=True, **self.how)
        if not out.requires_grad:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.dout)]

    def wrong(self, found: list[torch.Tensor]) -> torch.Tensor:
        far = [(a != b).any() for a, b in zip(found, self.first, strict=True)]
        if len(found) > 1 and not self.how.get("deterministic"):
            a, b = found[1].float(), self.first[1].float()
            far[1] = ((a - b).abs() > ULP * (b.abs() + b.square().mean().sqrt())).any()
        return torch.stack(far).any()


def main(seconds: float) -> None:
    kinds = [Calls(dim, how) for dim, how in KINDS]
    runs = wrong = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for calls in kinds:
            burst = [calls.run() for _ in range(BURST)]
            wrong += int(torch.stack([calls.wrong(each) for each in burst]).sum())
            runs += BURST
    print(runs, wrong)


if __name__ == "__main__":
    main(float(sys.argv[1]))
