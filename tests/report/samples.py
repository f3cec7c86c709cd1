"""Records, claims and attributions made by hand, small enough to check with a pencil."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assay.report.attribution import Attribution, StepShare
from assay.report.claims import Claim
from assay.report.estimates import Estimate
from assay.results.record import COLUMNS, SCHEMA, Record

_FIXED: Record = {
    "schema": SCHEMA, "id": "x", "time": "2026-11-15T10:00:00+00:00", "seconds": 0.5, "code": "1.0 (abc)",
    "device": "CPU", "host_cpu": "a CPU", "threads": 2, "platform": "Linux", "python": "3.11", "torch": "2.11",
    "numpy": "2.3", "triton": None, "case": "attention", "sweep": "precision", "variant": "flash", "tensor": "output",
    "inputs": "uniform", "distribution": "U[0, 1)", "batch": 1, "heads": 2, "length": 128, "dim": 64, "causal": False,
    "seed": 0, "format": "bf16", "order": "fa1", "block_rows": 50, "block_columns": 50, "block_shape": "paper",
    "options": "{}", "baseline": "eager bf16", "plan": "uniform bf16",
}  # fmt: skip


def row(**changes: Any) -> Record:
    """One record; a plan and a baseline follow the format unless they are given."""
    made = {**dict.fromkeys(COLUMNS), **_FIXED}
    if "format" in changes:
        made |= {"plan": f"uniform {changes['format']}", "baseline": f"eager {changes['format']}"}
    unknown = set(changes) - set(COLUMNS)
    assert not unknown, unknown
    return made | changes


def seeds(values: Sequence[float], column: str = "difference_max", **changes: Any) -> list[Record]:
    """A record for each value of the column, with seeds 0, 1, …"""
    return [row(**{column: value, "seed": seed, **changes}) for seed, value in enumerate(values)]


def study() -> list[Record]:
    """Records of every sweep, three seeds: enough for every figure and for every control."""
    rows = []
    for seed in range(3):
        noise = (1.0, 1.1, 1.3)[seed]
        for inputs, times in (("uniform", 8.0), ("normal", 2.0)):
            for plan, size in (("uniform", times), ("shipped", 0.5)):
                for format, unit in (("bf16", 2.0**-8), ("fp16", 2.0**-11), ("fp32", 2.0**-24)):
                    base = {
                        "inputs": inputs, "seed": seed, "format": format, "plan": f"{plan} {format}",
                        "baseline_error_max": unit * noise, "baseline_error_rmse": unit * noise / 5,
                    }  # fmt: skip

                    def at(factor: float, base: Record = base, big: float = size * unit * noise) -> Record:
                        value = big * factor
                        names = ("error_max", "difference_max", "difference_mean", "difference_std", "error_rmse")
                        return base | dict(zip(names, (value, value, value / 9, value / 7, value / 5), strict=True))

                    rows += [row(sweep="precision", **at(1), baseline=f"{b} {format}") for b in ("eager", "uniform")]
                    rows += [row(sweep="length", length=n, **at(n / 128)) for n in (128, 256, 512)]
                    for columns in (32, 64, 128):
                        shapes = {"paper": (32, columns), "swapped": (columns, 32), "square": (columns, columns)}
                        for shape, (high, wide) in shapes.items():
                            block = {"block_rows": high, "block_columns": wide, "block_shape": shape}
                            rows.append(row(sweep="blocks", **at(64 / columns), **block))
                    rows.append(row(sweep="inputs", **at(1)))
    for seed in range(3):
        for tensor, value in (("output", 0.5), ("dq", 0.7), ("dk", 1.2), ("dv", 0.9)):
            for kernel in ("SDPA flash", "SDPA math"):
                rows.append(
                    row(sweep="kernels", variant=kernel, tensor=tensor, seed=seed, order=None, block_rows=None)
                    | {"error_rmse": value * (1 + seed / 10), "baseline_error_rmse": 1.0}
                )
    return rows


def claim(**changes: Any) -> Claim:
    """A claim that holds."""
    texts: dict[str, Any] = {
        "number": "C1", "figure": "Fig 3", "text": "It falls.", "paper": "falls", "ours": ("1 [0.9, 1.1]",),
        "verdict": "holds", "because": "It does.", "anchor": "figure-3",
    }  # fmt: skip
    return Claim(**texts | changes)


def share(step: str, owns: float, alone: float = 0.1, saves: float = 0.05) -> StepShare:
    """A step with intervals of ± 2 points."""
    made = (Estimate(value, value - 0.02, value + 0.02, 5) for value in (owns, alone, saves))
    return StepShare(step=step, **dict(zip(("owns", "alone", "saves"), made, strict=True)))


def attribution(**changes: Any) -> Attribution:
    """Four steps; the running output owns most."""
    values: dict[str, Any] = {
        "inputs": "uniform", "format": "bf16", "length": 128, "low": "all steps in bf16", "high": "all steps in fp32",
        "low_rmse": Estimate(4e-3, 3e-3, 5e-3, 5), "high_rmse": Estimate(2e-6, 1e-6, 3e-6, 5),
        "steps": (
            share("output_accumulator", 0.61), share("normalization", 0.2), share("row_sum", 0.23, saves=-0.1),
            share("scores", -0.04),
        ),
        "setting": "order fa1, block 50×50, CPU",
    }  # fmt: skip
    return Attribution(**values | changes)
