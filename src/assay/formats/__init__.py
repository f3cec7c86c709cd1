"""Number formats as data, and rounding to them."""

import importlib
from typing import TYPE_CHECKING

from assay.formats.catalog import NAMED, get
from assay.formats.modes import ROUNDINGS
from assay.formats.scalar import round_scalar
from assay.formats.spec import Format

if TYPE_CHECKING:
    from assay.formats.block_scaling import mx_scales, round_to_mx
    from assay.formats.dtypes import storage_dtype
    from assay.formats.rounding import round_to

__all__ = [
    "NAMED",
    "ROUNDINGS",
    "Format",
    "get",
    "mx_scales",
    "round_scalar",
    "round_to",
    "round_to_mx",
    "storage_dtype",
]

# These need torch, which a look at a format does not: they are imported on first use.
_HOMES = {
    "mx_scales": "assay.formats.block_scaling",
    "round_to": "assay.formats.rounding",
    "round_to_mx": "assay.formats.block_scaling",
    "storage_dtype": "assay.formats.dtypes",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
