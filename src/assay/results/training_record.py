"""One row of paired training: two runs that differ in one field, compared at one step; or one run at one step."""

from __future__ import annotations

from assay.results.record import PROVENANCE
from assay.results.schema import Schema

COORDINATES: dict[str, type] = {
    "recipe": str,
    "pair": str,  # its name; None for a row about one run
    "arm": str,  # name of the run
    "reference": str,  # name of the run that the arm is compared with; None for a run's own row
    "changed": str,  # the one field in which the two differ
    "changed_from": str,  # its value in the reference
    "changed_to": str,  # its value in the arm
    "model": str,
    "data": str,
    "parameters": int,
    "attention": str,  # of the arm, as are precision and optimizer
    "precision": str,
    "optimizer": str,
    "batch": int,
    "seed": int,
    "steps": int,  # planned
    "step": int,
    "kind": str,  # "run", "weights", "gradients", "optimizer", "activations"
    "layer": str,  # "" for the whole model
}
MEASURED: dict[str, type] = {
    "count": int,  # values that were compared
    "max": float,
    "rmse": float,
    "w1": float,  # Wasserstein distance
    "std": float,  # of the reference: its own spread
    "relative_rmse": float,
    "relative_w1": float,
    "loss": float,
    "reference_loss": float,
    "held_out": float,  # loss on data that is not trained on
    "grad_norm": float,
    "scale": float,  # of the loss
    "skipped": int,  # steps skipped so far
    "step_seconds": float,
}
TRAINING = Schema(stem="training", version=1, columns={**PROVENANCE, **COORDINATES, **MEASURED})
"""Steps of trainings, and pairs of them compared, `training-….jsonl`."""
