"""What the sizes of a model must be."""

from __future__ import annotations


def check_counts(**counts: object) -> None:
    """Whole numbers of at least 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}.")


def check_multiple(name: str, value: int, of: str, factor: int) -> None:
    """The value must be a multiple of the factor."""
    if value % factor:
        below, above = value // factor * factor, (value // factor + 1) * factor
        near = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"{name} must be a multiple of {of} ({factor}), got {value}. {near} would do.")
