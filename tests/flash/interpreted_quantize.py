"""The quantising kernel in Triton's interpreter against the CPU code: scales, and what is not finite.

Run as `python -m tests.flash.interpreted_quantize` with TRITON_INTERPRET=1, which Triton reads when it is imported:
hence a process of its own. The interpreter's cast to 8 bits is not right (what rounds to the next power of two is half
as large, and E4M3 gets no NaN): of the values only where E5M2 has NaN is looked at.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from assay.flash import fp8_launch, gpu
from assay.flash.fp8 import FORMATS, FP8, _quantize_plainly, centres


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "processors", lambda index: 1)  # a program takes several blocks, of several heads
        for stages in (1, 2):
            patch.setattr(fp8_launch, "_how", lambda *_, stages=stages: (2, 4, stages))
            check()


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    ways = itertools.product(
        FORMATS, ("block", "head"), (False, True), (False, True), (0.0, 3e38, torch.inf, torch.nan)
    )
    for form, scaling, rotate, short, odd in ways:
        x, fp8 = torch.randn(2, 2, 150, 100, generator=generator), FP8(format=form, scaling=scaling)
        x[1, 1, 140, 7] = odd
        off = None if rotate else centres(x)
        if off is not None:
            assert torch.equal(fp8_launch.centres(x), off)
        here = _quantize_plainly(x, off, fp8, rotate, short)
        there = fp8_launch.quantize(x, off, fp8, rotate, short)
        assert torch.equal(here.scales, there.scales)
        if form == "e5m2":
            assert torch.equal(here.values.float().isnan(), there.values.float().isnan())


if __name__ == "__main__":
    main()
