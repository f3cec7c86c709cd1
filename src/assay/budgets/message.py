"""What a failed budget says: the figures, the worst element, what to do."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from assay.budgets.figures import Errors
from assay.budgets.verdict import Judged

_LEGEND = (
    "  (floor: the golden value rounded once; bits: how many last bits are wrong, the mean of log2(1 + ULPs);\n"
    "  bias: mean error; outward: mean error away from zero)"
)
_WIDTH = 110
_SEEDS_SHOWN = 5
_OTHERS_SHOWN = 8


def failure(name: str, over: Sequence[Judged], compared: int) -> str:
    """The message about those over their budgets, the worst first, of so many compared."""
    worst = over[0]
    parts = [
        f"{name} is over its error budget in {len(over)} of {compared} comparisons. The worst:",
        _figures(worst),
        _by_seed(worst),
        _worst_element(worst),
    ]
    if len(over) > 1:
        more = len(over) - 1 - _OTHERS_SHOWN
        others = [_in_short(judged) for judged in over[1 : 1 + _OTHERS_SHOWN]] + [f"{more} more"] * (more > 0)
        parts.append("\n  ".join(["Also over:", *others]))
    parts.append(textwrap.fill("What to do: " + _advice(worst), _WIDTH))
    return "\n\n".join(parts)


def table(name: str, judged: Sequence[Judged]) -> str:
    """All ratios, a line for each output and gradient under each distribution."""
    rows = [["", "inputs", "max", "RMSE", "bits", "bias", "outward", "budget", "ULPs: fn", "baseline"]]
    for j in judged:
        ulps = [f"{x.ulp_max:.3g}" for x in (j.fn, j.baseline)]
        rows.append([j.name, _drawn(j), *_ratios(j), f"{j.budget:g}", *ulps])
    return f"{name}: errors over the baseline's, on {judged[0].device}\n" + _aligned(rows)


def _where(judged: Judged) -> str:
    return f"{judged.name}, {judged.format} {judged.shape}, inputs {_drawn(judged)}, on {judged.device}"


def _drawn(judged: Judged) -> str:
    if judged.seeds[0].worst.seed is None:
        return "as given"
    seeds = "1 seed" if len(judged.seeds) == 1 else f"{len(judged.seeds)} seeds"
    return seeds if judged.distribution is None else f"{judged.distribution}, {seeds}"


def _figures(judged: Judged) -> str:
    rows = [["", "max", "RMSE", "bits", "bias", "outward", "ULPs: max", "mean"]]
    sources: dict[str, Errors] = {"fn": judged.fn, "baseline": judged.baseline, "floor": judged.floor}
    for of, errors in sources.items():
        biases = [_bias(*judged.interval(of, figure)) for figure in ("bias", "outward")]
        ulps = [f"{errors.ulp_max:.3g}", f"{errors.ulp_mean:.3g}"]
        rows.append([of, f"{errors.max:.3g}", f"{errors.rmse:.3g}", f"{errors.bits:.3g}", *biases, *ulps])
    verdicts = ["OVER" if check.over else "ok" for check in judged.checks]
    rows.append(["ratio", *_ratios(judged), "", ""])
    rows.append([f"budget {judged.budget:g}", *_five(verdicts), "", ""])
    text = f"{_where(judged)}\n{_aligned(rows)}\n{_LEGEND}"
    if judged.misplaced:
        text += f"\nNaN or infinite in wrong places: {judged.misplaced} of {judged.numbers} numbers"
    return text


def _bias(mean: float, half: float) -> str:
    return f"{mean:+.2g}" if math.isinf(half) else f"{mean:+.2g} ± {half:.1g}"


def _ratios(judged: Judged) -> list[str]:
    return _five([f"{check.ratio:.3g}" for check in judged.checks])


def _five(cells: list[str]) -> list[str]:
    """One set of inputs has three: its biases are not judged."""
    return cells + ["–"] * (5 - len(cells))


def _by_seed(judged: Judged) -> str:
    ranked = sorted(judged.seeds, key=lambda m: -m.ratio_max)[:_SEEDS_SHOWN]
    if len(judged.seeds) == 1:
        return "One set of inputs, so the bias is not judged: pass a function of the seed to have it judged."
    lines = [f"{m.worst.seed}: {m.ratio_max:.3g} and {m.ratio_rmse:.3g}" for m in ranked]
    shown = "" if len(ranked) == len(judged.seeds) else f" ({len(ranked)} of {len(judged.seeds)})"
    return textwrap.fill(f"Ratios of max and RMSE by seed, the worst first{shown}: " + "; ".join(lines), _WIDTH)


def _worst_element(judged: Judged) -> str:
    worst = max(judged.seeds, key=lambda m: (m.misplaced > 0, m.fn.max)).worst
    seed = "" if worst.seed is None else f"seed {worst.seed}, "
    return (
        f"Worst element: {seed}index {worst.position}: fn {worst.fn:.7g}, baseline {worst.baseline:.7g}, "
        f"golden {worst.golden:.9g}"
    )


def _in_short(judged: Judged) -> str:
    where = judged.name if judged.distribution is None else f"{judged.name} ({judged.distribution})"
    if judged.misplaced:
        return f"{where}: NaN or infinite in {judged.misplaced} wrong places"
    return f"{where}: " + ", ".join(f"{check.figure} {check.ratio:.3g}×" for check in judged.checks if check.over)


def _advice(judged: Judged) -> str:
    over = {check.figure for check in judged.checks if check.over}
    if judged.misplaced:
        return (
            "look at the element above for exp of a large number (subtract the maximum first), a sum or product beyond "
            "the format's largest value, 0/0, ∞ - ∞, and rows in which everything is masked."
        )
    if judged.baseline.max == 0:
        return (
            "the baseline is exact here, so only the rounding of the result is allowed. If the baseline rounds by "
            "itself also when it is given FP64, pass golden=. If exact results are meant, compare by torch.equal."
        )
    if over <= {"bias", "outward"}:
        return (
            "the errors are small but lean to one side and will not average out. Look for truncation instead of "
            "rounding, a biased approximation, a numerator and a denominator that are rounded differently."
        )
    if "bits" in over and not over & {"max", "RMSE"}:
        return (
            "large results are good, small ones are wrong. Look for small values that become zero, an epsilon that is "
            "large beside them, an approximation that is good to so many digits after the point, not so many bits."
        )
    if over <= {"max", "bias", "outward"}:
        return (
            "most elements are good, few are far off. Look at the index above: the edge of a block, a mask, an outlier "
            "in the inputs, cancellation."
        )
    return (
        "errors are too large throughout. Accumulate in FP32, round intermediate results less often, check scale and "
        "epsilon. If the algorithm is meant to lose this much, raise budget= and say why beside it."
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)
