"""The paper's claims about a single forward pass (C1–C6), judged from records; C7–C10 are about training.

A claim holds if it does for every kind of inputs measured, holds only when it does for some, and each sentence names
the interval that decides. The claims are about the paper's setting: every step in one format (the plan `uniform`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypedDict

from assay.report.attribution import attribute
from assay.report.estimates import Estimate, estimate, estimate_size
from assay.report.summary import ratio
from assay.results.record import Record

Verdict = Literal["holds", "holds only when …", "does not hold", "not measured here"]

ABOUT_TEN = (5.0, 20.0)
"""What counts as "roughly an order of magnitude": within a factor of two of 10."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One claim of the paper and what our records say about it."""

    number: str
    """C1 … C10, or "null"."""
    figure: str
    """The paper's, e.g. "Fig 4"."""
    text: str
    """What the paper says, in a sentence."""
    paper: str
    """The paper's figure, e.g. "about 10×"."""
    ours: tuple[str, ...]
    """Ours, with intervals: one or several lines."""
    verdict: Verdict
    because: str
    """What decides it; for "holds only when …", when."""
    anchor: str
    """The id of the chart in the page that shows it; "" where there is none."""


class _Outcome(TypedDict):
    verdict: Verdict
    because: str


def judge(rows: Sequence[Record]) -> list[Claim]:
    """Every claim, in the paper's order."""
    flash = [row for row in rows if row["variant"] == "flash"]
    return [
        _falls_with_mantissa(_of(flash, "precision")),
        _ten_times(_of(flash, "precision") + _of(flash, "length")),
        _grows_with_length(_of(flash, "length")),
        _swapped(_of(flash, "blocks")),
        _square(_of(flash, "blocks")),
        _larger_blocks(_of(flash, "blocks")),
        *_about_training(),
        _null(rows),
    ]


def verdict(rows: Sequence[Record]) -> str:
    """One sentence: how far, on what inputs, and which step owns it."""
    where = {"sweep": ("precision", "inputs", "length"), "format": ("bf16",)}
    near = [row for row in rows if all(row[name] in values for name, values in where.items())]
    lengths = sorted({row["length"] for row in near if _family(row) == "uniform"})
    if not lengths:
        return f"{len(rows)} points were measured; none of them compares flash with baseline in bf16."
    length = 1024 if 1024 in lengths else lengths[len(lengths) // 2]
    parts = []
    for name, words in (("uniform", "uniform inputs"), ("normal", "N(0, 1) inputs")):
        found = ratio(_unique(r for r in near if _is(r, inputs=name, length=length, family="uniform")))
        if found is not None:
            parts.append(f"{_times(found)} on {words}")
    text = f"With every step in bf16, Flash Attention's largest error is {' and '.join(parts)} that of eager bf16 "
    text += f"attention (N = {length})"
    kept = ratio(_unique(r for r in near if _is(r, inputs="uniform", length=length, family="shipped")))
    if kept is not None:
        better = "the more accurate of the two" if kept.high < 1 else "no better" if kept.low > 1 else "as accurate"
        text += f"; with the FP32 state that shipped kernels keep it is {_times(kept)}, {better}"
    owners = [a for a in attribute(rows) if a.inputs == "uniform" and a.format == "bf16"]
    if owners:
        first, second = owners[0].steps[:2]
        text += f". {first.step} owns {first.owns.value:.0%} of the mean square error, {second.step} "
        text += f"{second.owns.value:.0%}"
    return text + "."


def _falls_with_mantissa(rows: list[Record]) -> Claim:
    order = ("bf16", "fp16", "fp32", "fp64")
    lines, outcomes = [], {}
    for inputs, group in _by_inputs(rows):
        values = [estimate_size(r["difference_max"] for r in group if r["format"] == f) for f in order]
        there = [(f, v) for f, v in zip(order, values, strict=True) if v is not None]
        if len(there) < 2:
            continue
        outcomes[inputs] = all(after.high < before.low for (_, before), (_, after) in pairwise(there))
        sizes = (f"{f} {v.value:.1e} [{v.low:.1e}, {v.high:.1e}]" for f, v in there)
        lines.append(f"{inputs}: {' → '.join(sizes)}")
    return Claim(
        number="C1",
        figure="Fig 3",
        text="The difference between flash and baseline falls as the mantissa grows, from BF16 to FP64.",
        paper="falls at every step",
        ours=tuple(lines),
        anchor="figure-3",
        **_outcome(outcomes, "the interval of every format lies below that of the one before", "precision"),
    )


def _ten_times(rows: list[Record]) -> Claim:
    settings: dict[tuple[str, str, str], dict[int, list[Record]]] = {}
    for row in rows:
        if row["format"] == "bf16":
            key = (row["inputs"], _family(row), _baseline(row))
            settings.setdefault(key, {}).setdefault(row["length"], []).append(row)
    lines, outcomes, held = [], [], []
    for (inputs, family, baseline), lengths in sorted(settings.items(), key=_paper_first):
        if baseline != "eager" and family != "uniform":
            continue  # every step against every step is said once; the rest is in the chart
        found = {n: r for n in sorted(lengths) if (r := ratio(_unique(lengths[n]))) is not None}
        if not found:
            continue
        name = f"{inputs} inputs, {_WORDS.get(family, family)}, baseline {baseline}"
        lines.append(f"{name}: " + ", ".join(f"{_times(r)} at N {n}" for n, r in found.items()))
        near = [n for n, r in found.items() if ABOUT_TEN[0] <= r.value <= ABOUT_TEN[1]]
        outcomes += [n in near for n in found]
        if near:
            held.append(f"{name}, N {min(near)}" + (f" to {max(near)}" if len(near) > 1 else ""))
    because = "No setting comes within a factor of two of 10×."
    if held:
        because = f"Within a factor of two of 10× for {'; '.join(held)}. {_what_turns_it(settings)}"
    return Claim(
        number="C2",
        figure="Fig 4",
        text="Against golden, flash deviates about 10 times more than baseline at BF16 (largest error).",
        paper="about 10×",
        ours=tuple(lines),
        verdict=_judgement(outcomes),
        because=because if outcomes else _missing("precision"),
        anchor="figure-4",
    )


def _paper_first(setting: tuple[tuple[str, str, str], object]) -> tuple[bool, bool, bool]:
    """The paper's baseline and plan before others; sorting keeps the order of the rest."""
    (inputs, family, baseline), _ = setting
    return baseline != "eager", family != "uniform", inputs != "uniform"


def _what_turns_it(settings: dict[tuple[str, str, str], dict[int, list[Record]]]) -> str:
    """The same ratio with one thing changed at a time, at the middle length that has everything."""
    changes = {
        "every step in bf16": ("uniform", "uniform", "eager"),
        "N(0, 1) inputs instead": ("normal", "uniform", "eager"),
        "what is carried from block to block in FP32": ("uniform", "uniform, state in fp32", "eager"),
        "a baseline with every step rounded": ("uniform", "uniform", "uniform"),
    }
    there = {words: settings[key] for words, key in changes.items() if key in settings}
    lengths = sorted(set.intersection(*(set(found) for found in there.values()))) if there else []
    if len(there) < 2 or not lengths:
        return ""
    length = 1024 if 1024 in lengths else lengths[len(lengths) // 2]
    ratios = {words: ratio(_unique(found[length])) for words, found in there.items()}
    parts = [f"{words} {_times(found)}" for words, found in ratios.items() if found is not None]
    return f"What turns it, uniform inputs at N {length}: {'; '.join(parts)}."


def _grows_with_length(rows: list[Record]) -> Claim:
    lines, outcomes = [], {}
    for inputs, group in _by_inputs([row for row in rows if row["format"] == "bf16"]):
        slopes = {f: _slope(group, "length", f"difference_{f}") for f in ("max", "mean", "std")}
        relative = _slope(group, "length", "difference_rmse", over="golden_rms")
        there = {f: s for f, s in slopes.items() if s is not None}
        if not there:
            continue
        outcomes[inputs] = all(s.low > 0 for s in there.values())
        text = ", ".join(f"{f} {s.value:+.2f} [{s.low:+.2f}, {s.high:+.2f}]" for f, s in there.items())
        also = "" if relative is None else f"; RMS over that of the output {relative.value:+.2f}"
        lines.append(f"{inputs}: grows as N to the power of {text}{also}")
    return Claim(
        number="C3",
        figure="Fig 5",
        text="At a fixed tile, max, mean and standard deviation of the difference grow with the sequence length.",
        paper="all three grow",
        ours=tuple(lines),
        anchor="figure-5a",
        **_outcome(outcomes, "the slopes of all three, log against log, lie above 0", "length"),
    )


def _swapped(rows: list[Record]) -> Claim:
    return _block_claim(
        rows,
        number="C4",
        figure="Fig 6a",
        text="Swapping the block's dimensions raises the deviation.",
        paper="raises it",
        anchor="figure-6a",
        shape="swapped",
        holds=lambda found: found.low > 1,
        when="the interval lies above 1",
    )


def _square(rows: list[Record]) -> Claim:
    return _block_claim(
        rows,
        number="C5",
        figure="Fig 6b",
        text="Square blocks make no significant difference.",
        paper="no difference",
        anchor="figure-6b",
        shape="square",
        holds=lambda found: found.low <= 1 <= found.high,
        when="the interval contains 1",
    )


def _block_claim(
    rows: list[Record],
    *,
    number: str,
    figure: str,
    text: str,
    paper: str,
    anchor: str,
    shape: str,
    holds: Callable[[Estimate], bool],
    when: str,
) -> Claim:
    """Deviation with another shape over that with the paper's, where the two differ."""
    lines, outcomes = [], {}
    for inputs, group in _by_inputs(rows):
        found = {}
        for fmt in dict.fromkeys(row["format"] for row in group):
            ratio_found = _shape_ratio([row for row in group if row["format"] == fmt], shape)
            if ratio_found is not None:
                found[fmt] = ratio_found
                outcomes[f"{inputs}, {fmt}"] = holds(ratio_found)
        if found:
            lines.append(f"{inputs}: " + ", ".join(f"{fmt} {_times(r)}" for fmt, r in found.items()))
    return Claim(
        number=number, figure=figure, text=text, paper=paper, ours=tuple(lines), anchor=anchor,
        **_outcome(outcomes, f"{shape} over the paper's shape: {when}", "blocks"),
    )  # fmt: skip


def _shape_ratio(rows: list[Record], shape: str) -> Estimate | None:
    """Over the seeds, each the geometric mean over the areas where the shape is not the paper's anyway."""
    plain = {(r["seed"], _area(r)): r for r in rows if r["block_shape"] == "paper"}
    logs: dict[int, list[float]] = {}
    for row in rows:
        # A square is a little smaller than the paper's block: of these, the next larger one.
        areas = [area for seed, area in plain if seed == row["seed"] and area >= _area(row)]
        if row["block_shape"] != shape or not areas:
            continue
        other = plain[row["seed"], min(areas)]
        if row["block_columns"] != other["block_columns"] and row["difference_max"] > 0 < other["difference_max"]:
            logs.setdefault(row["seed"], []).append(math.log(row["difference_max"] / other["difference_max"]))
    return estimate_size(math.exp(math.fsum(found) / len(found)) for found in logs.values())


def _larger_blocks(rows: list[Record]) -> Claim:
    lines, outcomes = [], {}
    for inputs, group in _by_inputs([row for row in rows if row["block_shape"] == "paper"]):
        found = {}
        for fmt in dict.fromkeys(row["format"] for row in group):
            slope = _slope([row for row in group if row["format"] == fmt], "area", "difference_max")
            if slope is not None:
                found[fmt] = slope
                outcomes[f"{inputs}, {fmt}"] = slope.high < 0
        if found:
            text = ", ".join(f"{fmt} {s.value:+.2f} [{s.low:+.2f}, {s.high:+.2f}]" for fmt, s in found.items())
            lines.append(f"{inputs}: as the area to the power of {text}")
    return Claim(
        number="C6",
        figure="Fig 6c",
        text="Larger blocks lower the deviation.",
        paper="lower it",
        ours=tuple(lines),
        anchor="figure-6c",
        **_outcome(outcomes, "the slope, log against log, lies below 0", "blocks"),
    )


def _about_training() -> list[Claim]:
    claims = (
        ("C7", "Fig 7", "The difference in the weights grows over training.", "grows in both metrics"),
        ("C8", "Fig 8", "Its rate is at most that of another initialisation.", "comparable or less"),
        ("C9", "Fig 8", "Flash moves the weights 2–5 times less than FP16 training does.", "2–5×"),
        ("C10", "", "Flash is 14% faster, forward and backward, in a text-to-image model.", "14%"),
    )
    return [
        Claim(
            number=number, figure=figure, text=text, paper=paper, ours=(), verdict="not measured here",
            because="It is about training; this study runs single forward passes.", anchor="",
        )
        for number, figure, text, paper in claims
    ]  # fmt: skip


def _null(rows: Sequence[Record]) -> Claim:
    ours = [row for row in rows if row["variant"] == "flash"]
    worst = max((row["null_max"] for row in ours), default=math.nan)
    verdict: Verdict = "not measured here" if not ours else "holds" if worst == 0 else "does not hold"
    lines = [f"flash: {worst:g} at {len(ours)} points"] if ours else []
    return Claim(
        number="null",
        figure="",
        text="The same computation twice gives the same bits.",
        paper="must be 0",
        ours=(*lines, *unsteady_kernels(rows)),
        verdict=verdict,
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


_WORDS = {"uniform": "every step in bf16", "uniform, state in fp32": "state in FP32", "shipped": "as shipped"}


def _of(rows: Iterable[Record], sweep: str) -> list[Record]:
    return [row for row in rows if row["sweep"] == sweep]


def _family(row: Record) -> str:
    """The plan's name without its format."""
    return str(row["plan"]).replace(f" {row['format']}", "")


def _baseline(row: Record) -> str:
    return str(row["baseline"]).replace(f" {row['format']}", "")


def _is(row: Record, *, inputs: str, length: int, family: str) -> bool:
    where = (row["inputs"], row["length"], _family(row), _baseline(row))
    return where == (inputs, length, family, "eager")


def _unique(rows: Iterable[Record]) -> list[Record]:
    """One record a seed: two sweeps may have measured the same setting."""
    return list({row["seed"]: row for row in rows}.values())


def _by_inputs(rows: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """The records of the paper's setting: every step in one format, the baseline as PyTorch does it."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        if _family(row) == "uniform" and _baseline(row) == "eager":
            found.setdefault(row["inputs"], []).append(row)
    return list(found.items())


def _area(row: Record) -> int:
    return int(row["block_rows"] * row["block_columns"])


def _slope(rows: list[Record], x: str, y: str, over: str | None = None) -> Estimate | None:
    """The slope of log y against log x by least squares, over the seeds."""
    seeds: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        value = row[y] / row[over] if over else row[y]
        if value > 0 and math.isfinite(value):
            seeds.setdefault(row["seed"], []).append((math.log(_area(row) if x == "area" else row[x]), math.log(value)))
    slopes = []
    for points in seeds.values():
        middle = math.fsum(a for a, _ in points) / len(points)
        spread = math.fsum((a - middle) ** 2 for a, _ in points)
        if spread > 0:
            slopes.append(math.fsum((a - middle) * b for a, b in points) / spread)
    return estimate(slopes)


def _times(found: Estimate) -> str:
    return f"{found.value:.3g}× [{found.low:.3g}, {found.high:.3g}]"


def _judgement(outcomes: Iterable[bool]) -> Verdict:
    found = list(outcomes)
    if not found:
        return "not measured here"
    return "holds" if all(found) else "holds only when …" if any(found) else "does not hold"


def _missing(sweep: str) -> str:
    return f"No records: assay sweep {sweep}."


def _names(outcomes: dict[str, bool], wanted: bool) -> str:
    """ "uniform, bf16" and "uniform, fp16" become "uniform (bf16, fp16)"."""
    inputs: dict[str, list[str]] = {}
    for name, holds in outcomes.items():
        if holds == wanted:
            first, _, rest = name.partition(", ")
            inputs.setdefault(first, []).append(rest)
    return "; ".join(name + (f" ({', '.join(formats)})" if any(formats) else "") for name, formats in inputs.items())


def _outcome(outcomes: dict[str, bool], test: str, sweep: str) -> _Outcome:
    """`verdict` and `because` of a claim that is tested once for each kind of inputs (and format)."""
    judgement = _judgement(outcomes.values())
    if judgement == "not measured here":
        return {"verdict": judgement, "because": _missing(sweep)}
    because = f"Tested: {test}."
    if judgement == "holds only when …":
        because = f"For {_names(outcomes, True)}; not for {_names(outcomes, False)}. {because}"
    return {"verdict": judgement, "because": because}
