"""The formats that have names."""

from __future__ import annotations

import re
from types import MappingProxyType

from assay._suggest import did_you_mean
from assay.formats.spec import Format

FP64 = Format(exponent=11, mantissa=52, name="fp64")
FP32 = Format(exponent=8, mantissa=23, name="fp32")
TF32 = Format(exponent=8, mantissa=10, name="tf32")
BF16 = Format(exponent=8, mantissa=7, name="bf16")
FP16 = Format(exponent=5, mantissa=10, name="fp16")
FP8_E4M3 = Format(exponent=4, mantissa=3, infinities=False, nan="single", name="fp8_e4m3")
FP8_E5M2 = Format(exponent=5, mantissa=2, name="fp8_e5m2")
FP6_E2M3 = Format(exponent=2, mantissa=3, infinities=False, nan="none", name="fp6_e2m3")
FP6_E3M2 = Format(exponent=3, mantissa=2, infinities=False, nan="none", name="fp6_e3m2")
FP4_E2M1 = Format(exponent=2, mantissa=1, infinities=False, nan="none", name="fp4_e2m1")

NAMED = MappingProxyType(
    {f.name: f for f in (FP64, FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2, FP6_E2M3, FP6_E3M2, FP4_E2M1)}
)
"""Name → format: FP64 to FP4."""

_EXMY = re.compile(r"e(\d+)m(\d+)")


def get(name: str | Format) -> Format:
    """The format called `name`: one of the catalog, or any IEEE-like `eXmY` such as `e8m13`.

    A `Format` is returned as it is, so that every function that takes a format takes both.
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise ValueError(f"A format must be a Format or a name such as 'bf16', got {type(name).__name__}.")
    if name in NAMED:
        return NAMED[name]
    if match := _EXMY.fullmatch(name):
        return Format(exponent=int(match[1]), mantissa=int(match[2]))
    hint = did_you_mean(name.lower(), NAMED)
    raise ValueError(
        f"Unknown format {name!r}. {hint}Known: {', '.join(NAMED)}, or any eXmY such as e8m13, "
        "or build one with assay.Format(exponent=..., mantissa=...)."
    )
