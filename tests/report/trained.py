"""Rows of paired training made by hand: three seeds that differ by known factors."""

from __future__ import annotations

from typing import Any

from assay.results.record import Record
from assay.results.training_record import TRAINING

FACTORS = (1.0, 1.1, 1.3)
"""By seed."""
STEPS = (1, 10, 20)
_FIXED: Record = {
    "schema": 1, "id": "x", "time": "2026-11-15T10:00:00+00:00", "seconds": 0.5, "code": "1.0 (abc)",
    "device": "CPU", "host_cpu": "a CPU", "threads": 2, "platform": "Linux", "python": "3.11", "torch": "2.11",
    "numpy": "2.3", "recipe": "quick", "model": "text_to_image tiny", "data": "shapes", "parameters": 1000,
    "attention": "standard", "precision": "bf16", "optimizer": "adamw", "batch": 8, "steps": 20, "layer": "",
}  # fmt: skip
SIZES = {
    "null": (0.0, 0.0), "flash": (0.0, 1e-6), "other initialisation": (2e-3, 1e-5), "BF16 ↔ FP32": (0.0, 1.2e-6),
    "FP16 ↔ FP32": (0.0, 3e-6), "FP16 ↔ FP32, same steps": (0.0, 2.5e-6), "skipped steps alone": (0.0, 0.0),
}  # fmt: skip
"""Pair → (at the start, growth a step) of W1."""
_CHANGED = {
    "flash": ("attention", "standard", "flash"),
    "other initialisation": ("init_seed", "0", "1"),
    "null": ("", "", ""),
}


def training_row(**changes: Any) -> Record:
    """One row."""
    unknown = set(changes) - set(TRAINING.columns)
    assert not unknown, unknown
    return dict.fromkeys(TRAINING.columns) | _FIXED | changes


def pair_row(pair: str, seed: int, step: int, w1: float, **changes: Any) -> Record:
    """Two trainings compared at one step: a largest difference of 100 W1, an RMS of 2 W1, a spread of 0.1."""
    changed, before, after = _CHANGED.get(pair, ("precision", "fp32", "fp16"))
    figures = {"max": 100 * w1, "rmse": 2 * w1, "w1": w1, "std": 0.1, "relative_rmse": 20 * w1, "relative_w1": 10 * w1}
    names = {"arm": f"{pair} arm", "reference": "base", "changed": changed, "changed_from": before, "changed_to": after}
    place = {"pair": pair, "seed": seed, "step": step, "kind": "weights", "count": 1000}
    return training_row(**{**place, **names, **figures, **changes})


def run_row(arm: str, seed: int, step: int, **changes: Any) -> Record:
    """One training at one step: a loss that falls from 2 to 1."""
    found = {"loss": (2 - step / 20) * FACTORS[seed], "scale": 1.0, "skipped": 0, "step_seconds": 0.1}
    return training_row(**{"arm": arm, "seed": seed, "step": step, "kind": "run", **found, **changes})


def pairs(sizes: dict[str, tuple[float, float]] = SIZES, **changes: Any) -> list[Record]:
    """Every pair at every step."""
    return [
        pair_row(pair, seed, step, (start + growth * step) * factor, **changes)
        for seed, factor in enumerate(FACTORS)
        for step in STEPS
        for pair, (start, growth) in sizes.items()
    ]


def trained(**changes: Any) -> list[Record]:
    """A whole study: pairs, layers, other kinds, and the runs with their scales and held-out losses."""
    rows = pairs(**changes)
    layers = ("words.weight", "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "blocks.10.mlp.up.weight", "last")
    rows += [row | {"layer": layer} for row in pairs(**changes) for layer in layers]
    rows += [row | {"kind": kind} for row in pairs(**changes) for kind in ("gradients", "activations")]
    for seed in range(len(FACTORS)):
        for step in range(1, 21):
            held_out = 3.0 - step / 10 if step in STEPS else None
            rows.append(run_row("base", seed, step, held_out=held_out, **changes))
            scaled = {"scale": 2.0**16 if step < 5 else 2.0**15, "skipped": int(step >= 5)}
            rows.append(run_row("flash arm", seed, step, attention="flash", **changes))
            rows.append(run_row("fp16", seed, step, **scaled, **changes))
    return [row | {"id": str(number)} for number, row in enumerate(rows)]


def png(width: int = 2, height: int = 2) -> bytes:
    """A small picture."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()
