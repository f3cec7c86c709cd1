"""A figure as data: what the page, the image files and the Markdown draw. Nothing here knows how to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["line", "bar", "hbar", "heat"]
"""Of a "heat" a series is a row, and its values are colours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line, or one colour of bars: points with their 95% intervals."""

    name: str
    x: tuple[str | float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: tuple[int, ...]
    extra: tuple[str, ...] = ()
    """Per point, a further line for those who hover."""
    colour: int = 0
    """Index into the palette; the marker follows it."""
    dash: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The figure for one choice of inputs, plan, baseline and whatever else varies."""

    choices: tuple[tuple[str, str], ...]
    """(what is chosen, the choice); the same names in the same order in all variants of a chart."""
    series: tuple[Series, ...]
    setting: str
    """What was held fixed, in words."""
    notes: tuple[str, ...] = ()
    """What the drawing cannot say: points that are not in it and why, ratios."""

    @property
    def name(self) -> str:
        """The choices in words; "" where there is nothing to choose."""
        return ", ".join(f"{name} {value}" for name, value in self.choices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One figure with its variants, the one to show first in front."""

    anchor: str
    """Its id in the page, and the beginning of its files' names."""
    title: str
    caption: str
    x_title: str
    y_title: str
    kind: Kind
    x_log: bool = False
    y_log: bool = True
    band: bool = False
    """Whether intervals are bands around the lines, not whiskers."""
    reference: float | None = None
    """Where "no difference" is: a line there, and bars start from it."""
    categories: tuple[str, ...] | None = None
    """The x values in order where they are words, also those that no variant could draw."""
    variants: tuple[Variant, ...]

    def options(self) -> dict[str, tuple[str, ...]]:
        """What can be chosen → the choices, in order."""
        found: dict[str, dict[str, None]] = {}
        for variant in self.variants:
            for name, value in variant.choices:
                found.setdefault(name, {})[value] = None
        return {name: tuple(values) for name, values in found.items()}
