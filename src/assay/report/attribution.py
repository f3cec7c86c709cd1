"""Which steps own the deviation: from the records of the sweep `steps`."""

from __future__ import annotations

from dataclasses import dataclass

from assay.report.estimates import Estimate


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
