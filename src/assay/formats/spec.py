"""What a number format is: plain data, nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

NanCodes = Literal["ieee", "single", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format with one sign bit.

    `Format(exponent=5, mantissa=10)` is IEEE half precision; any other ExMy is one line too.
    What a format does beyond its range is data as well, so that no default hides it.
    """

    exponent: int
    """Exponent bits, 1 to 11."""
    mantissa: int
    """Stored mantissa bits (the leading one is not counted), 0 to 52."""
    infinities: bool = True
    """Whether the format can hold ±inf."""
    nan: NanCodes = "ieee"
    """"ieee": the top exponent is inf/NaN; "single": only all-ones is NaN (OCP "fn"); "none": no NaN."""
    subnormals: bool = True
    """Whether values under the smallest normal exist; without them results are flushed to zero."""
    name: str = field(default="", compare=False)
    """A short name; `e5m10` and the like when not given (fn: one NaN, no infinity; n: neither; z: no subnormals).

    Two formats with the same values are equal, whatever they are called."""

    def __post_init__(self) -> None:
        for field_name in ("exponent", "mantissa"):
            if type(getattr(self, field_name)) is not int:
                raise ValueError(
                    f"Format: {field_name} must be a whole number of bits, got {getattr(self, field_name)!r}."
                )
        if not 1 <= self.exponent <= 11:
            raise ValueError(
                f"Format: exponent must be 1 to 11 bits (FP64 has 11), got {self.exponent}. "
                "Wider ranges cannot be carried by any torch dtype."
            )
        if not 0 <= self.mantissa <= 52:
            raise ValueError(
                f"Format: mantissa must be 0 to 52 bits (FP64 has 52), got {self.mantissa}. "
                "Longer mantissas cannot be carried by any torch dtype."
            )
        if self.nan not in ("ieee", "single", "none"):
            raise ValueError(f"Format: nan must be 'ieee', 'single' or 'none', got {self.nan!r}.")
        if self.infinities and self.nan != "ieee":
            raise ValueError(
                "Format: a format with infinities keeps the whole top exponent for inf/NaN (nan='ieee'), "
                f"got nan={self.nan!r}. Set infinities=False for an OCP-style 'fn' format."
            )
        if not self.infinities and self.nan == "ieee":
            raise ValueError(
                "Format: nan='ieee' reserves the top exponent, which also holds infinities; "
                "got infinities=False. Use nan='single' or nan='none'."
            )
        if self.nan == "ieee" and self.exponent == 1:
            raise ValueError(
                "Format: one exponent bit leaves no finite normal number when the top exponent is reserved. "
                "Use infinities=False, nan='none'."
            )
        if not self.infinities and self.exponent == 11:
            raise ValueError(
                "Format: 11 exponent bits without infinities reach 2^1024, which no torch dtype can carry, "
                "got infinities=False. Use at most 10 exponent bits, or keep the infinities."
            )
        if self.nan == "single" and self.mantissa == 0 and self.exponent == 1:
            raise ValueError("Format: E1M0 with a NaN code has no normal number left. Use nan='none'.")
        if not self.name:
            suffix = {"ieee": "", "single": "fn", "none": "n"}[self.nan] + ("" if self.subnormals else "z")
            object.__setattr__(self, "name", f"e{self.exponent}m{self.mantissa}{suffix}")

    def __str__(self) -> str:
        return self.name

    def replace(self, **changes: object) -> Format:
        """The same format with some fields changed; its name is made anew unless given."""
        known = [f.name for f in fields(self)]
        for change in changes:
            if change not in known:
                raise ValueError(f"Format has no field {change!r}. Its fields: {', '.join(known)}.")
        return replace(self, **{"name": "", **changes})  # type: ignore[arg-type]

    @property
    def bits(self) -> int:
        """Width in bits, sign included."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number (and of every subnormal)."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        top = (1 << self.exponent) - 1
        if self.nan == "ieee" or (self.nan == "single" and self.mantissa == 0):
            top -= 1
        return top - self.bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        significand = 2.0 - 2.0**-self.mantissa
        if self.nan == "single" and self.mantissa > 0:
            significand -= 2.0**-self.mantissa  # all-ones is NaN
        return float(significand * 2.0**self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value."""
        return float(2.0**self.min_exponent)

    @property
    def smallest(self) -> float:
        """Smallest positive value, subnormals included where the format has them."""
        return float(2.0 ** (self.min_exponent - self.mantissa)) if self.subnormals else self.smallest_normal

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return float(2.0**-self.mantissa)
