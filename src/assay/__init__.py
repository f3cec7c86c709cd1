"""Assay: how far a fast implementation is from the golden value, and which step causes that.

The names below are imported on first use: `import assay` costs milliseconds and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from assay._version import __version__

if TYPE_CHECKING:
    from assay import formats
    from assay.budgets.assertion import assert_within_budget
    from assay.cases.attention.baseline import baseline_attention
    from assay.cases.attention.golden import golden_attention
    from assay.cases.attention.plan import Plan
    from assay.cases.attention.tiled import tiled_attention
    from assay.flash.attention import flash_attention
    from assay.flash.sdpa import scaled_dot_product_attention
    from assay.formats.block_scaling import round_to_mx
    from assay.formats.rounding import round_to
    from assay.formats.spec import Format
    from assay.integrations.sdpa import use_for_sdpa
    from assay.metrics.deviation import Deviation, deviation
    from assay.metrics.state_dicts import compare_state_dicts
    from assay.metrics.wasserstein import wasserstein
    from assay.watching.watch import watch

_HOMES = {
    "Deviation": "assay.metrics.deviation",
    "Format": "assay.formats.spec",
    "Plan": "assay.cases.attention.plan",
    "assert_within_budget": "assay.budgets.assertion",
    "baseline_attention": "assay.cases.attention.baseline",
    "compare_state_dicts": "assay.metrics.state_dicts",
    "deviation": "assay.metrics.deviation",
    "flash_attention": "assay.flash.attention",
    "golden_attention": "assay.cases.attention.golden",
    "round_to": "assay.formats.rounding",
    "round_to_mx": "assay.formats.block_scaling",
    "scaled_dot_product_attention": "assay.flash.sdpa",
    "tiled_attention": "assay.cases.attention.tiled",
    "use_for_sdpa": "assay.integrations.sdpa",
    "wasserstein": "assay.metrics.wasserstein",
    "watch": "assay.watching.watch",
}

__all__ = [
    "Deviation",
    "Format",
    "Plan",
    "__version__",
    "assert_within_budget",
    "baseline_attention",
    "compare_state_dicts",
    "deviation",
    "flash_attention",
    "formats",
    "golden_attention",
    "round_to",
    "round_to_mx",
    "scaled_dot_product_attention",
    "tiled_attention",
    "use_for_sdpa",
    "wasserstein",
    "watch",
]


def __getattr__(name: str) -> object:
    if name == "formats":
        return importlib.import_module("assay.formats")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'assay' has no attribute {name!r}; its public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
