"""One measured point, flat, so that any tool reads it: what was measured, how, on what, and what came out."""

from __future__ import annotations

from assay.results.schema import Record as Record
from assay.results.schema import Schema

SCHEMA = 1
PROVENANCE: dict[str, type] = {
    "schema": int,
    "id": str,  # of the point: the same point on the same device has the same id, so it is measured once
    "time": str,  # UTC, ISO 8601
    "seconds": float,  # that measuring took
    "code": str,  # version of assay, and the commit it ran from
    "device": str,  # "CPU" or the GPU's name
    "host_cpu": str,
    "threads": int,
    "platform": str,
    "python": str,
    "torch": str,
    "numpy": str,
    "triton": str,
}
COORDINATES: dict[str, type] = {
    "case": str,  # "attention"
    "sweep": str,
    "variant": str,  # "flash", or the name of a real kernel
    "tensor": str,  # "output", "dq", "dk", "dv"
    "inputs": str,  # "uniform", "normal", …, or "file:" and the file's name
    "distribution": str,  # the same in words
    "batch": int,
    "heads": int,
    "length": int,  # of the queries
    "keys": int,  # the length of the keys and values
    "dim": int,
    "causal": bool,
    "seed": int,
    "format": str,  # of the inputs and outputs
    "order": str,  # "fa1", "fa2", "split_kv"; None for a real kernel
    "block_rows": int,
    "block_columns": int,
    "block_shape": str,  # "paper", "swapped", "square", "given"
    "options": str,  # further options of the call as JSON, "{}" for none
    "baseline": str,  # name of the plan of the baseline that the variant is compared with
    # The sweep `steps` only. ladder: the two plans that it goes between. role: "high" and "low" (all steps), "lower"
    # and "raise" (one step changed), "path" (the first `position` steps of a random order raised, `step` the last).
    "ladder": str,
    "role": str,
    "step": str,
    "path": int,
    "position": int,
    "plan": str,  # name
}
PLAN_STEPS = (
    "inputs", "scores", "scale", "maximum", "exponential", "row_sum", "rescale", "probabilities", "accumulator",
    "output_accumulator", "normalization", "output", "log_sum_exp", "recomputed", "delta", "dprobabilities",
    "dscores", "dq", "dk", "dv",
)  # fmt: skip
PLAN: dict[str, type] = {
    **{f"plan_{step}": str for step in PLAN_STEPS},
    "plan_accumulator_width": int,
    "plan_accumulator_truncates": bool,
    "plan_promotion": int,
    "plan_saturate": bool,
}
COMPARISONS = {
    "error": "the variant against golden",
    "baseline_error": "the baseline against golden",
    "difference": "the variant against the baseline",
}
FIGURES: dict[str, type] = {
    "max": float,
    "mean": float,
    "std": float,
    "rmse": float,
    "relative": float,
    "bias": float,
    "bias_low": float,
    "bias_high": float,
    "ulp_max": float,
    "ulp_mean": float,
    "q50": float,
    "q90": float,
    "q99": float,
    "q999": float,
    "cosine": float,
    "sqnr": float,
    "w1": float,  # Wasserstein distance
    "nonfinite": int,  # positions that disagree about NaN or an infinity
}
MEASURED: dict[str, type] = {
    **{f"{comparison}_{figure}": kind for comparison in COMPARISONS for figure, kind in FIGURES.items()},
    "null_max": float,  # the variant against itself, computed again
    "golden_rms": float,  # the size of the golden values
    "inputs_error_max": float,  # golden on the rounded inputs against golden on the inputs before rounding
    "inputs_error_rmse": float,
}
COLUMNS: dict[str, type] = {**PROVENANCE, **COORDINATES, **PLAN, **MEASURED}

POINTS = Schema(stem="records", version=SCHEMA, columns=COLUMNS, others=("training", "watch"))
"""Points of sweeps, `records-….jsonl`: provenance, coordinates, the plan, what was measured."""
to_json, from_json = POINTS.to_json, POINTS.from_json
