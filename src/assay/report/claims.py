"""The paper's claims about a single forward pass (C1–C6), judged from records; `training_claims` has C7–C10.

They are about the paper's setting: every step in one format (the plan `uniform`), the baseline as PyTorch computes it
(`eager`). Each setting is judged by itself, by its interval, as yes, no or undecided; the claim holds if all say yes,
holds only when some do, and the text names them. Records that differ in more than the seed never share an interval.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypedDict

from assay.report.attribution import attribute
from assay.report.choices import latest
from assay.report.claim import Claim as Claim
from assay.report.estimates import Estimate, estimate_size
from assay.report.judgement import Outcome, Verdict, is_flat, judged, power, share, times, within
from assay.report.pair_summary import nulls
from assay.report.settings import (
    area_of,
    baseline_of,
    by_setting,
    family_of,
    length_of,
    one_a_seed,
    slope_over_seeds,
    usual_setting,
)
from assay.report.summary import ratio
from assay.report.training_claims import null_lines, sentence, training_claims
from assay.results.record import Record

ABOUT_TEN = (5.0, 20.0)
"""What counts as "roughly an order of magnitude": within a factor of two of 10."""
NO_CHANGE = (0.9, 1.1)
"""What counts as no change of a deviation."""


def judge(rows: Sequence[Record], training: Sequence[Record] = ()) -> list[Claim]:
    """Every claim, in the paper's order; `training` has the rows of paired training."""
    flash = latest([row for row in rows if row["variant"] == "flash"])
    return [
        _falls_with_mantissa(_of(flash, "precision")),
        _ten_times(_of(flash, "precision", "length")),
        _grows_with_length(_of(flash, "length")),
        _block_claim(_of(flash, "blocks"), "swapped", _SWAPPED),
        _block_claim(_of(flash, "blocks"), "square", _SQUARE),
        _larger_blocks(_of(flash, "blocks")),
        *training_claims(training),
        _null(rows, training),
    ]


def verdict(rows: Sequence[Record], training: Sequence[Record] = ()) -> str:
    """In a few sentences: how far, on what inputs, which step owns it, and what training makes of it."""
    near = latest(
        [row for row in rows if row["variant"] == "flash" and row["sweep"] in ("precision", "inputs", "length")]
    )
    near = [row for row in near if baseline_of(row) == "eager"]
    formats = [row["format"] for row in near]
    fmt = "bf16" if "bf16" in formats else next(iter(formats), "")
    near = usual_setting(row for row in near if row["format"] == fmt)
    parts: list[str] = []
    for inputs in sorted(dict.fromkeys(row["inputs"] for row in near), key=lambda i: (i != "uniform", i != "normal")):
        found = ratio(one_a_seed(r for r in near if r["inputs"] == inputs and family_of(r) == "uniform"))
        if found is not None and len(parts) < 2:
            kept = ratio(one_a_seed(r for r in near if r["inputs"] == inputs and family_of(r) == "shipped"))
            shipped = "" if kept is None else f" ({times(kept)} with the FP32 state of shipped kernels)"
            parts.append(f"{times(found)}{shipped} on {inputs} inputs")
    sentences = []
    if parts:
        sentences.append(
            f"With every step in {fmt}, Flash Attention's largest error is {' and '.join(parts)} that of eager {fmt} "
            f"attention (N = {near[0]['length']})."
        )
    owners = sorted(attribute(rows), key=lambda a: (a.inputs != "uniform", a.format != "bf16"))
    if owners:
        first, second = (f"{s.step} {share(s.owns)}" for s in owners[0].steps[:2])
        sentences.append(
            f"Of the mean square error in {owners[0].format} ({owners[0].inputs} inputs) {first} and {second} own most."
        )
    sentences += filter(None, [sentence(training)])
    count = len(rows) + len(training)
    return " ".join(sentences) or f"{count} points were measured; figures and intervals are below."


def _falls_with_mantissa(rows: list[Record]) -> Claim:
    order = ("bf16", "fp16", "fp32", "fp64")
    lines: list[str] = []
    outcomes: dict[str, Outcome] = {}
    for name, group in by_setting(rows, vary=("format",)).items():
        formats = {f: {r["seed"]: r["difference_max"] for r in group if r["format"] == f} for f in order}
        sizes = {f: v for f in order if (v := estimate_size(formats[f].values())) is not None}
        steps = [
            estimate_size(
                formats[b][seed] / formats[a][seed]
                for seed in formats[a].keys() & formats[b].keys()
                if formats[a][seed]
            )
            for a, b in pairwise(sizes)
        ]
        if not steps:
            continue
        if any(step is not None and step.low >= 1 for step in steps):
            outcomes[name] = False
        else:
            falls = all(step is not None and step.high < 1 for step in steps)
            outcomes[name] = True if falls and len(sizes) == len(order) else None
        listed = (f"{f} {v.value:.1e} [{v.low:.1e}, {v.high:.1e}]" for f, v in sizes.items())
        lines.append(f"{name}: {' → '.join(listed)}")
    return Claim(
        number="C1",
        figure="Fig 3",
        text="The difference between flash and baseline falls as the mantissa grows, from BF16 to FP64.",
        paper="falls at every step",
        ours=tuple(lines),
        anchor="figure-3",
        **judged(
            outcomes, "each format over the one before, seed by seed, lies below 1, for all four", rows, "precision"
        ),
    )


def _ten_times(rows: list[Record]) -> Claim:
    rows = [row for row in rows if row["format"] == "bf16"]
    lines: list[str] = []
    outcomes: dict[str, Outcome] = {}
    turns: list[str] = []
    for family, baseline, words in _TURNS:
        wanted = [row for row in rows if (family_of(row), baseline_of(row)) == (family, baseline)]
        for name, group in by_setting(wanted, vary=("length", "block shape"), paper=False).items():
            lengths = sorted({row["length"] for row in group})
            found = {
                n: r for n in lengths if (r := ratio(one_a_seed(x for x in group if x["length"] == n))) is not None
            }
            if not found:
                continue
            lines.append(f"{name}, {words}: " + ", ".join(f"{times(r)} at N {n}" for n, r in found.items()))
            if (family, baseline) == _TURNS[0][:2]:
                outcomes |= {f"{name}, N {n}": within(r, ABOUT_TEN) for n, r in found.items()}
            if 1024 in found and ((family, baseline) == _TURNS[0][:2] or group[0]["inputs"] == "uniform"):
                turns.append(f"{name}, {words} {times(found[1024])}")
    found_out = judged(outcomes, "the ratio of largest errors lies within a factor of two of 10", rows, "precision")
    if len(turns) > 1:
        found_out["because"] += f" What turns it, at N 1024: {'; '.join(turns)}."
    return Claim(
        number="C2",
        figure="Fig 4",
        text="Against golden, flash deviates about 10 times more than baseline at BF16 (largest error).",
        paper="about 10×",
        ours=tuple(lines),
        anchor="figure-4",
        **found_out,
    )


def _grows_with_length(rows: list[Record]) -> Claim:
    lines, outcomes = [], {}
    for name, group in by_setting([r for r in rows if r["format"] == "bf16"], vary=("length",)).items():
        slopes = {
            f: s
            for f in ("max", "mean", "std")
            if (s := slope_over_seeds(group, length_of, f"difference_{f}")) is not None
        }
        relative = slope_over_seeds(group, length_of, "difference_rmse", over="golden_rms")
        if len(slopes) < 3:
            continue
        grows = [s.low > 0 for s in slopes.values()]
        stays = [s.high <= 0 or is_flat(s) for s in slopes.values()]
        outcomes[name] = True if all(grows) else False if any(stays) else None
        also = "" if relative is None else f"; RMS over that of the output {power(relative)}"
        lines.append(f"{name}: as N to the power of " + ", ".join(f"{f} {power(s)}" for f, s in slopes.items()) + also)
    return Claim(
        number="C3",
        figure="Fig 5",
        text="At a fixed tile, max, mean and standard deviation of the difference grow with the sequence length.",
        paper="all three grow",
        ours=tuple(lines),
        anchor="figure-5a",
        **judged(outcomes, "the slopes of all three, log against log, lie above 0", rows, "length"),
    )


class _Shape(TypedDict):
    number: str
    figure: str
    text: str
    paper: str
    anchor: str


_SWAPPED: _Shape = {
    "number": "C4",
    "figure": "Fig 6a",
    "text": "Swapping the block's dimensions raises the deviation.",
    "paper": "raises it",
    "anchor": "figure-6a",
}
_SQUARE: _Shape = {
    "number": "C5",
    "figure": "Fig 6b",
    "text": "Square blocks make no significant difference.",
    "paper": "no difference",
    "anchor": "figure-6b",
}


def _raises(found: Estimate) -> Outcome:
    if found.low > 1:
        return True
    return False if found.high < 1 or within(found, NO_CHANGE) else None


def _block_claim(rows: list[Record], shape: str, told: _Shape) -> Claim:
    """Deviation with another shape over that with the paper's, where the two differ."""
    decide, test = _raises, "lies above 1; within 10% of 1 is no change"
    if shape == "square":
        decide, test = (lambda found: within(found, NO_CHANGE)), "lies within 10% of 1"
    lines, outcomes = [], {}
    for name, group in by_setting(rows, vary=("block", "block shape"), always=("inputs", "format")).items():
        found = _shape_ratio(group, shape)
        if found is not None:
            outcomes[name] = decide(found)
            lines.append(f"{name}: {times(found)}")
    return Claim(
        ours=tuple(lines), **told, **judged(outcomes, f"{shape} over the paper's shape {test}", rows, "blocks")
    )


def _shape_ratio(rows: list[Record], shape: str) -> Estimate | None:
    """Over the seeds, each the geometric mean over the areas where the shape is not the paper's anyway."""
    plain: dict[int, dict[int, Record]] = {}
    for row in rows:
        if row["block_shape"] == "paper":
            plain.setdefault(row["seed"], {})[area_of(row)] = row
    areas = {seed: sorted(found) for seed, found in plain.items()}
    logs: dict[int, list[float]] = {}
    for row in rows:
        # A square is a little smaller than the paper's block: of these, the next larger one.
        place = bisect_left(areas.get(row["seed"], []), area_of(row))
        if row["block_shape"] != shape or place == len(areas.get(row["seed"], [])):
            continue
        other = plain[row["seed"]][areas[row["seed"]][place]]
        if row["block_columns"] != other["block_columns"] and row["difference_max"] > 0 < other["difference_max"]:
            logs.setdefault(row["seed"], []).append(math.log(row["difference_max"] / other["difference_max"]))
    return estimate_size(math.exp(math.fsum(found) / len(found)) for found in logs.values())


def _larger_blocks(rows: list[Record]) -> Claim:
    lines, outcomes = [], {}
    paper = [row for row in rows if row["block_shape"] == "paper"]
    for name, group in by_setting(paper, vary=("block", "block shape"), always=("inputs", "format")).items():
        slope = slope_over_seeds(group, area_of, "difference_max")
        if slope is not None:
            outcomes[name] = True if slope.high < 0 else False if slope.low >= 0 or is_flat(slope) else None
            lines.append(f"{name}: as the area to the power of {power(slope)}")
    return Claim(
        number="C6",
        figure="Fig 6c",
        text="Larger blocks lower the deviation.",
        paper="lower it",
        ours=tuple(lines),
        anchor="figure-6c",
        **judged(outcomes, "the slope, log against log, lies below 0; within 0.05 of it is none", rows, "blocks"),
    )


def _null(rows: Sequence[Record], training: Sequence[Record]) -> Claim:
    ours = [row for row in rows if row["variant"] == "flash"]
    worst = max((row["null_max"] for row in ours), default=0.0)
    lines = [f"flash: {worst:g} at {len(ours)} points"] if ours else []
    trained = null_lines(training)
    verdict: Verdict = "holds" if worst == 0 and not nulls(training) else "does not hold"
    return Claim(
        number="null",
        figure="",
        text="The same computation twice gives the same bits.",
        paper="must be 0",
        ours=(*lines, *trained, *unsteady_kernels(rows)),
        verdict=verdict if ours or trained else "not measured here",
        because="Otherwise no figure here could be trusted. It is about flash: a real kernel may add up in any order.",
        anchor="",
    )


def unsteady_kernels(rows: Iterable[Record]) -> list[str]:
    """Real kernels that gave other bits when they ran again: a gradient summed up by atomics, for example."""
    worst: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row["variant"] != "flash" and row["null_max"] != 0:
            key = (row["variant"], row["tensor"], row["format"])
            worst[key] = max(worst.get(key, 0.0), row["null_max"])
    return [
        f"{kernel}, {tensor} in {fmt}: up to {size:.1e} when run again" for (kernel, tensor, fmt), size in worst.items()
    ]


_TURNS = (
    ("uniform", "eager", "every step in bf16"),
    ("uniform, state in fp32 or wider", "eager", "what is carried from block to block in FP32"),
    ("shipped", "eager", "as shipped"),
    ("uniform", "uniform", "every step in bf16, of the baseline too"),
)
"""(plan, baseline, words): what C2 is about, and what turns it."""


def _of(rows: Iterable[Record], *sweeps: str) -> list[Record]:
    return [row for row in rows if row["sweep"] in sweeps]
