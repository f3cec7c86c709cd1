"""Which steps own the deviation: from the records of the sweep `steps`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from assay.report.estimates import Estimate, estimate, estimate_size
from assay.report.summary import Table
from assay.results.record import Record

_SETTING = ("inputs", "format", "batch", "heads", "length", "dim", "causal", "order", "block_rows", "block_columns",
            "baseline", "options", "device", "ladder")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """What one step contributes to the mean square error, as shares of the error of the all-low plan (1 = all)."""

    step: str
    owns: Estimate
    """Mean over random orders of raising the steps (Shapley): the shares of all steps add up to 1."""
    alone: Estimate
    """All-high with this step lowered: how much this step does by itself."""
    saves: Estimate
    """All-low with this step raised: how much goes away. Below 0: raising it alone makes things worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """The steps of one setting, largest owner first."""

    inputs: str
    format: str
    length: int
    low: str
    """Name of the all-low plan."""
    high: str
    low_rmse: Estimate
    high_rmse: Estimate
    steps: tuple[StepShare, ...]
    setting: str
    """Shape, order, block, device in words."""


def attribute(rows: Sequence[Record]) -> list[Attribution]:
    """An attribution for each setting of the sweep `steps`; settings with fewer than 2 whole seeds are left out."""
    settings: dict[tuple[object, ...], list[Record]] = {}
    for row in rows:
        if row["sweep"] == "steps":
            settings.setdefault(tuple(row[name] for name in _SETTING), []).append(row)
    found = (_attribution(group) for group in settings.values())
    return [attribution for attribution in found if attribution is not None]


def _attribution(rows: Sequence[Record]) -> Attribution | None:
    seeds: dict[int, list[Record]] = {}
    for row in rows:
        seeds.setdefault(row["seed"], []).append(row)
    whole = [_Seed(group) for group in seeds.values() if _is_whole(group)]
    steps = sorted({row["step"] for row in rows if row["role"] == "raise"})
    low_rmse = estimate_size(seed.low**0.5 for seed in whole)
    high_rmse = estimate_size(seed.high**0.5 for seed in whole)
    if low_rmse is None or high_rmse is None:
        return None
    shares = []
    for step in steps:
        owns, alone, saves = (
            estimate(getattr(seed, figure)(step) for seed in whole) for figure in ("owns", "alone", "saves")
        )
        if owns is None or alone is None or saves is None:
            return None
        shares.append(StepShare(step=step, owns=owns, alone=alone, saves=saves))
    first = rows[0]
    names = {row["role"]: row["plan"] for row in rows}
    return Attribution(
        inputs=first["inputs"],
        format=first["format"],
        length=first["length"],
        low=names["low"],
        high=names["high"],
        low_rmse=low_rmse,
        high_rmse=high_rmse,
        steps=tuple(sorted(shares, key=lambda share: -share.owns.value)),
        setting=(
            f"inputs {first['distribution']}, (batch, heads, length, dim) = ({first['batch']}, {first['heads']}, "
            f"{first['length']}, {first['dim']}), order {first['order']}, block "
            f"{first['block_rows']}×{first['block_columns']}, {first['device']}, {len(whole)} seeds"
        ),
    )


def _is_whole(rows: Sequence[Record]) -> bool:
    """Whether everything is there, and finite: a run that was stopped leaves a seed half done."""
    steps = {row["step"] for row in rows if row["role"] == "raise"}
    return (
        {row["role"] for row in rows} >= {"low", "high", "lower", "raise", "path"}
        and {row["step"] for row in rows if row["role"] == "lower"} == steps
        and all(
            sorted(row["step"] for row in rows if row["role"] == "path" and row["path"] == path) == sorted(steps)
            for path in {row["path"] for row in rows if row["role"] == "path"}
        )
        and all(math.isfinite(row["error_rmse"]) for row in rows)
    )


class _Seed:
    """The mean square errors of one seed, and the shares that follow from them."""

    def __init__(self, rows: Sequence[Record]) -> None:
        self.rows = rows
        self.low = next(_square(row) for row in rows if row["role"] == "low")
        self.high = next(_square(row) for row in rows if row["role"] == "high")

    def owns(self, step: str) -> float:
        drops = []
        for path in {row["path"] for row in self.rows if row["role"] == "path"}:
            way = sorted((r for r in self.rows if r["path"] == path), key=lambda row: row["position"])
            errors = [self.low, *map(_square, way)]
            at = next(i for i, row in enumerate(way) if row["step"] == step)
            drops.append(errors[at] - errors[at + 1])
        return math.fsum(drops) / len(drops) / (self.low - self.high)

    def alone(self, step: str) -> float:
        return (self._one("lower", step) - self.high) / (self.low - self.high)

    def saves(self, step: str) -> float:
        return (self.low - self._one("raise", step)) / (self.low - self.high)

    def _one(self, role: str, step: str) -> float:
        return next(_square(row) for row in self.rows if row["role"] == role and row["step"] == step)


def _square(row: Record) -> float:
    return float(row["error_rmse"] ** 2)


def in_words(attribution: Attribution) -> str:
    """The steps that own nine tenths of it, and how much they do."""
    owners, owned = [], 0.0
    for share in attribution.steps:
        owners.append(f"{share.step} {share.owns.value:.0%}")
        owned += share.owns.value
        if owned >= 0.9:
            break
    return f"{', '.join(owners)} own {owned:.0%} of the mean square error."


def table(attribution: Attribution) -> Table:
    """For a terminal: shares of the mean square error in %, each with half the width of its interval."""

    def share(found: Estimate) -> str:
        return f"{100 * found.value:.1f} ±{100 * (found.high - found.value):.1f}"

    return Table(
        title=f"{attribution.low}: {attribution.setting}. RMSE {attribution.low_rmse}, with {attribution.high} "
        f"{attribution.high_rmse}. {in_words(attribution)}",
        columns=("step", "owns %", "alone %", "saves %"),
        rows=tuple((s.step, share(s.owns), share(s.alone), share(s.saves)) for s in attribution.steps),
        settings=1,
    )
