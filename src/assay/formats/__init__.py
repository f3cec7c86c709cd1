"""Number formats as data, and rounding to them."""

from assay.formats.catalog import NAMED, get
from assay.formats.spec import Format

__all__ = ["NAMED", "Format", "get"]
