"""What a watch saw, as a small table and in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from assay.results.record import Record
from assay.results.watched import Compared, call_of, compared, head_cell, place, place_of_nonfinite, why_over

_HEADER = (
    "layer", "tensor", "calls", "error / baseline's, worst", "typical", "worst head", "largest error", "scores",
    "over budget",
)  # fmt: skip


def summary(
    rows: Iterable[Record],
    skipped: Mapping[str, int],
    first_over: Record | None,
    first_nonfinite: Record | None = None,
) -> str:
    """One line for each layer and tensor, from the rows of whole calls; beside them the worst head.

    A call is over budget if it is as a whole or in one of its heads.
    """
    seen = compared(rows)
    groups: dict[tuple[str, str], list[Compared]] = {}
    for one in seen:
        groups.setdefault((one.whole["layer"], one.whole["tensor"]), []).append(one)
    lines = [_HEADER, *(_line(layer, tensor, found) for (layer, tensor), found in groups.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [
        f"Not compared: {count} call{'s' if count != 1 else ''} with {reason}." for reason, count in skipped.items()
    ]
    nonfinite = _nonfinite(seen, first_nonfinite)
    text += nonfinite
    if first_over is not None:
        text.append(f"First over budget: {place(first_over)}, {why_over(first_over)}.")
    elif any(one.whole["over"] is not None for one in seen):
        text.append("All else is within budget." if nonfinite else "All within budget.")
    return "\n".join(text)


def _nonfinite(seen: Sequence[Compared], first: Record | None) -> list[str]:
    """How many calls have NaN or infinities, and which was the first; its row may not be kept any more."""
    bad = [one.whole for one in seen if one.nonfinite]
    first = first or next(iter(bad), None)
    if first is None:
        return []
    count, calls = len({call_of(row) for row in bad}), len({call_of(one.whole) for one in seen})
    return [f"NaN or infinity in {count} of {calls} calls, first in {place_of_nonfinite(first)}."]


def _line(layer: str, tensor: str, found: list[Compared]) -> tuple[str, ...]:
    rows = [one.whole for one in found]
    ratios = sorted(row["ratio_rmse"] for row in rows if row["ratio_rmse"] is not None)
    low = [row["logit_min"] for row in rows if row["logit_min"] is not None]
    high = [row["logit_max"] for row in rows if row["logit_max"] is not None]
    largest = max(row["error_max"] if row["error_max"] is not None else row["difference_max"] for row in rows)
    return (
        layer or "(the model)",
        tensor,
        str(len(rows)),
        f"{ratios[-1]:.2f}" if ratios else "–",
        f"{ratios[len(ratios) // 2]:.2f}" if ratios else "–",
        head_cell(found),
        f"{largest:.2e}",
        f"{min(low):.3g} … {max(high):.3g}" if low else "",
        str(sum(one.over is not None for one in found)),
    )
