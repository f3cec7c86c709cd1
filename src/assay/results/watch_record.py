"""One row of a watch: one tensor of one attention call of a running model, all heads or one."""

from __future__ import annotations

from assay.results.record import PROVENANCE
from assay.results.schema import Schema

COORDINATES: dict[str, type] = {
    "watch": str,  # one for each `with assay.watch(…)`
    "model": str,  # its class
    "layer": str,  # the module that made the call, as the model names it
    "head": int,  # None for all heads
    "step": int,  # how often the model had run before
    "call": int,  # how many calls the layer had made in that step before
    "tensor": str,  # "output", "dq", "dk", "dv"
    "implementation": str,  # what the model called
    "against": str,  # what it is compared with
    "format": str,  # of q, k and v
    "batch": int,
    "heads": int,
    "kv_heads": int,
    "queries": int,
    "keys": int,
    "dim": int,
    "causal": bool,
    "masked": bool,  # whether there is a mask or bias beside that
}
ERROR = (
    "max", "mean", "std", "rmse", "relative", "bias", "bias_low", "bias_high", "ulp_max", "ulp_mean", "q99", "w1",
    "cosine", "sqnr", "nonfinite",
)  # fmt: skip
"""The figures of `assay.watching.figures`."""
MEASURED: dict[str, type] = {
    **{f"error_{name}": float for name in ERROR},  # of the call, against golden
    "baseline_max": float,  # error of what it is compared with, against golden
    "baseline_rmse": float,
    "baseline_bias": float,
    "difference_max": float,  # between the two
    "difference_rmse": float,
    "ratio_max": float,  # error of the call over that of the other, or of one rounding of golden if that is larger
    "ratio_rmse": float,
    "budget": float,  # what ratio_rmse may be
    "over": bool,  # whether it is more (of a head: with 8 rows at least), or a NaN or infinity is in a wrong place
    "logit_min": float,
    "logit_max": float,
    "entropy": float,  # of the probabilities, mean over the rows, in nats
    "tied": float,  # share of rows whose largest score is shared, in the format of the call
    "actual_nonfinite": float,  # elements of the call's tensor that are NaN or infinite, also where golden's are
}
WATCH = Schema(stem="watch", version=1, columns={**PROVENANCE, **COORDINATES, **MEASURED}, added=("actual_nonfinite",))
"""Calls of watched models, whole and head by head, `watch-….jsonl`."""
