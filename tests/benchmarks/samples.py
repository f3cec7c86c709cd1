"""A made-up record."""

from __future__ import annotations

from benchmarks.record import (
    CUDNN,
    FA2,
    FLEX,
    FP8,
    FP8_KERNEL,
    OURS,
    PARTS,
    PLAIN,
    Case,
    Part,
    Point,
    Record,
    cases,
    takes_flex,
)

ENVIRONMENT = {"device": "Made-up GPU", "torch": "2.11.0", "triton": "3.6.0", "cudnn": 91900}


def point(case: Case, part: Part, rates: dict[str, float], *, same_bits: bool | None = None) -> Point:
    """With so many TFLOP/s each."""
    twin_flops = 0.0 if case.twin is None else case.twin.flops(part)
    return Point(
        part=part,
        kind=case.kind,
        name=case.name,
        dim=case.dim,
        length=case.length,
        causal=case.causal,
        flops=case.flops(part),
        twin_flops=twin_flops,
        ms={who: (twin_flops if who == PLAIN else case.flops(part)) / rate / 1e9 for who, rate in rates.items()},
        matmul=750.0,
        same_bits=same_bits,
    )


def record(factor: float = 1.2) -> Record:
    """A whole run in which ours is `factor` times as fast as cuDNN, and as fast as its own plain kernel."""
    made = Record(date="2026-01-02T03:04:05+00:00", environment=dict(ENVIRONMENT), fp8_rmse=5e-3)
    for case in cases(PARTS):
        for part in case.parts:
            full = {64: 450.0, 128: 570.0, 256: 590.0}[case.dim] * {"forward": 1.0, "backward": 0.8, "both": 0.85}[part]
            theirs = full * case.length / (case.length + (700 if case.causal else 250))
            rates = {OURS: factor * theirs, CUDNN: theirs}
            if case.kind == "plain":
                rates |= {FA2: 0.55 * theirs, **({FLEX: 0.75 * theirs} if takes_flex(case) else {})}
            elif case.kind in (FP8, FP8_KERNEL):
                rates = {OURS: 1.6 * theirs, PLAIN: theirs}
            elif case.twin is not None:
                rates |= {PLAIN: factor * theirs}
            if case.window:
                del rates[CUDNN]
            same = True if case.kind == "deterministic" else None
            made.points.append(point(case, part, rates, same_bits=same))
    return made
