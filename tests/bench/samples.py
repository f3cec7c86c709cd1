"""Made-up measurements."""

from __future__ import annotations

from assay.bench.figures import Figure, Point
from assay.bench.shapes import Pass, Shape

Seconds = dict[str, list[float]]


def point(
    seconds: Seconds, *, length: int = 512, dim: int = 128, queries: int | None = None, which: Pass = "forward"
) -> Point:
    shape = Shape(
        batch=2,
        heads=4,
        kv_heads=4,
        queries=queries or length,
        keys=length,
        dim=dim,
        causal=queries is None,
    )
    made = Point(shape=shape, dtype="bf16", ceiling_flops=2e12, ceiling_samples=[0.001, 0.002, 0.004], input_sets=2)
    for name, samples in seconds.items():
        flash = name not in ("standard", "SDPA math")
        made.figures.append(Figure(contender=name, flash=flash, which=which, samples=samples, peak_bytes=3 * 2**20))
    return made
