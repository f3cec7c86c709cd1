"""What a watch saw, as a small table and in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from assay.results.record import Record

_HEADER = ("layer", "tensor", "calls", "error / baseline's, worst", "typical", "largest error", "scores", "over budget")


def summary(rows: Iterable[Record], skipped: Mapping[str, int], first_over: Record | None) -> str:
    """One line for each layer and tensor, from the rows of whole calls."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        if row["head"] is None:
            groups.setdefault((row["layer"], row["tensor"]), []).append(row)
    lines = [_HEADER, *(_line(layer, tensor, found) for (layer, tensor), found in groups.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [f"Not compared: {count} calls with {reason}." for reason, count in skipped.items()]
    if first_over is not None:
        text.append(
            f"First over budget: {first_over['tensor']} of {first_over['layer'] or 'the model'} at step "
            f"{first_over['step']}, {first_over['ratio_rmse']:.2g} times the baseline's error "
            f"(largest {first_over['ratio_max']:.2g})."
        )
    elif any(row["over"] is not None for found in groups.values() for row in found):
        text.append("All within budget.")
    return "\n".join(text)


def _line(layer: str, tensor: str, rows: list[Record]) -> tuple[str, ...]:
    judged = [row for row in rows if row["ratio_rmse"] is not None]
    ratios = sorted(row["ratio_rmse"] for row in judged)
    low = [row["logit_min"] for row in rows if row["logit_min"] is not None]
    high = [row["logit_max"] for row in rows if row["logit_max"] is not None]
    largest = max(row["error_max"] if row["error_max"] is not None else row["difference_max"] for row in rows)
    return (
        layer or "(the model)",
        tensor,
        str(len(rows)),
        f"{ratios[-1]:.2f}" if ratios else "–",
        f"{ratios[len(ratios) // 2]:.2f}" if ratios else "–",
        f"{largest:.2e}",
        f"{min(low):.3g} … {max(high):.3g}" if low else "",
        str(sum(bool(row["over"]) for row in judged)),
    )
