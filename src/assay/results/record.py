"""One measured row, flat, so that any tool reads it: what was measured, how, on what, and what came out.

`COLUMNS` is the schema: every record has exactly these columns. A column is a str, int, float or bool, or None
where it does not apply. In JSON, NaN and the infinities are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
"""Raised when a column changes its meaning; records of another schema are refused, not guessed at."""

Record = dict[str, Any]
"""Column → value."""

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
_NOT_FINITE = ("nan", "inf", "-inf")
COLUMNS: dict[str, type] = {**PROVENANCE, **COORDINATES, **PLAN, **MEASURED}


def to_json(record: Mapping[str, Any]) -> str:
    """One line of JSON, checked against the schema."""
    _check_columns(record)
    line = json.dumps({name: _checked(name, record[name]) for name in COLUMNS}, ensure_ascii=False, allow_nan=False)
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a record must be text that UTF-8 can write, got {error.object[error.start]!r}") from None
    return line


def from_json(line: str) -> Record:
    """The record of one line; a ValueError says what is wrong with it."""
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(values, dict) or "schema" not in values:
        raise ValueError("not a record of Assay: it has no schema")
    if values["schema"] != SCHEMA:
        raise ValueError(f"a record of schema {values['schema']!r}; this version reads schema {SCHEMA}")
    _check_columns(values)
    return {name: _decoded(name, _checked(name, values[name])) for name in COLUMNS}


def _check_columns(record: Mapping[str, Any]) -> None:
    unknown = [name for name in record if name not in COLUMNS]
    missing = [name for name in COLUMNS if name not in record]
    if unknown or missing:
        raise ValueError(f"a record must have the columns of the schema; unknown: {unknown}, missing: {missing}")


def _checked(name: str, value: Any) -> Any:
    """The value as JSON has it; a ValueError if it is not of the column's kind."""
    kind = COLUMNS[name]
    if name == "schema" and value != SCHEMA:
        raise ValueError(f"column schema must be {SCHEMA}, got {value!r}")
    if value is None and name not in ("schema", "id", "time"):
        return None
    if kind is float and type(value) in (int, float):
        return _as_float(name, value)
    if kind is float and type(value) is str and value in _NOT_FINITE:
        return value
    if type(value) is not kind:
        raise ValueError(f"column {name} must be {kind.__name__}, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"column {name} must fit into 64 bits, got {value}")
    return value


def _as_float(name: str, value: int | float) -> float | str:
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"column {name} must be a float, got a whole number beyond its range") from None
    return number if math.isfinite(number) else str(number)


def _decoded(name: str, value: Any) -> Any:
    return float(value) if COLUMNS[name] is float and value is not None else value
