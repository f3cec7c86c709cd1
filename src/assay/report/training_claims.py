"""The paper's claims about training (C7–C10), judged from rows of paired training, study by study."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypedDict

from assay.report.claim import Claim
from assay.report.estimates import Estimate, estimate, estimate_size
from assay.report.judgement import Judgement, Outcome, judged, times, within
from assay.report.pair_summary import FLASH, FLASH_IN_FP16, INITIALISATION, nulls, verdicts
from assay.report.training_rows import runs, studies, whole
from assay.report.trajectories import Trajectory, ratio, slope_ratio, trajectories
from assay.results.record import Record

TWO_TO_FIVE = (2.0, 5.0)
"""The paper's: low precision over flash."""
FASTER = 1.07
"""What counts as the paper's 14% faster: at least half of it."""
LOW = {
    "FP16": "FP16 ↔ FP32",
    "BF16": "BF16 ↔ FP32",
    "FP16 against FP32 that skips the same steps": "FP16 ↔ FP32, same steps",
}
"""In words → name of the pair. The last is the control: its loss scaler's skipped steps are on both sides."""
_Found = tuple[dict[str, Outcome], list[str]]


class _Told(TypedDict):
    number: str
    figure: str
    text: str
    paper: str
    anchor: str


def training_claims(rows: Sequence[Record]) -> list[Claim]:
    """C7 to C10."""
    pairs = [row for row in rows if row["pair"] is not None]
    return [_claim(told, test, judge, _rows(told, pairs, rows)) for told, test, judge in _CLAIMS]


def sentence(rows: Sequence[Record]) -> str:
    """What flash does to the weights of the first study, in a sentence; "" where nothing says it."""
    for name, group in studies(rows).items():
        kept, _ = whole(group)
        told = next((words for words in verdicts(kept) if words.startswith(f"{FLASH}: ")), None)
        if told is not None and trajectories(kept, "w1")[FLASH].last is not None:
            last = max(row["step"] for row in kept)
            return f"After {last} steps of training ({name}), flash against standard attention{told[len(FLASH) :]}"
    return ""


def null_lines(rows: Sequence[Record]) -> list[str]:
    """What came of training the same thing twice."""
    count = sum(row["pair"] is not None and row["changed"] == "" for row in rows)
    if not count:
        return []
    wrong = nulls(rows)
    if not wrong:
        return [f"the same training twice: 0 in all {count} comparisons"]
    worst = max(row["max"] for row in wrong)
    return [f"the same training twice: up to {worst:.1e}, first at step {min(row['step'] for row in wrong)}"]


def _rows(told: _Told, pairs: Sequence[Record], rows: Sequence[Record]) -> Sequence[Record]:
    return pairs if told["number"] != "C10" else _on_gpu(rows)


def _claim(told: _Told, test: str, judge: Callable[[str, list[Record]], _Found], rows: Sequence[Record]) -> Claim:
    outcomes: dict[str, Outcome] = {}
    lines: list[str] = []
    for name, group in studies(rows).items():
        found, said = judge(name, whole(group)[0])
        outcomes |= found
        lines += said
    return Claim(ours=tuple(lines), **told, **_judged(told["number"], outcomes, test, rows))


def _judged(number: str, outcomes: dict[str, Outcome], test: str, rows: Sequence[Record]) -> Judgement:
    if not rows:
        where = " on CUDA, with the same training under standard attention and under flash" if number == "C10" else ""
        return {"verdict": "not measured here", "because": f"No records of paired training{where}: assay pair quick."}
    if not outcomes and number == "C10" and all(row["step_seconds"] is None for row in rows if row["kind"] == "run"):
        because = "Several seeds shared the GPU, so no step was timed: assay pair speed times them one by one."
        return {"verdict": "not measured here", "because": because}
    if not outcomes:
        because = "It needs at least two seeds, at two steps or more, of flash and of what it is compared with."
        return {"verdict": "undecided", "because": f"{because} assay pair quick has all."}
    return judged(outcomes, test, rows, "")


def _grows(name: str, rows: list[Record]) -> _Found:
    found = {"W1": _flash(rows, "w1"), "max": _flash(rows, "max")}
    slopes = {word: slope for word, t in found.items() if t is not None and (slope := t.slope) is not None}
    if len(slopes) < 2:
        return {}, []
    grows: Outcome = None
    if all(slope.low > 0 for slope in slopes.values()):
        grows = True
    elif any(slope.high <= 0 for slope in slopes.values()):
        grows = False
    lines = [
        f"{name}, {word}: {_size(t.at(t.steps[0]))} at step {t.steps[0]} → {_size(t.last)} at step {t.steps[-1]}, "
        f"{_size(slopes[word])} a step"
        for word, t in found.items()
        if t is not None
    ]
    return {name: grows}, lines


def _at_most_another_initialisation(name: str, rows: list[Record]) -> _Found:
    flash, other = _flash(rows, "w1"), trajectories(rows, "w1").get(INITIALISATION)
    if flash is None or other is None:
        return {}, []
    ours, theirs = flash.slopes(), other.slopes()
    gap = estimate(ours[seed] - theirs[seed] for seed in ours if seed in theirs)
    if gap is None:
        return {}, []
    times_as = slope_ratio(flash, other)
    more = "" if times_as is None else f": {times(times_as)} as much"
    outcome = True if gap.high <= 0 else False if gap.low > 0 else None
    line = f"{name}: W1 a step {_size(flash.slope)}, with another initialisation {_size(other.slope)}{more}"
    return {name: outcome}, [line]


def _less_than_low_precision(name: str, rows: list[Record]) -> _Found:
    found, flash = trajectories(rows, "w1"), _flash(rows, "w1")
    outcomes: dict[str, Outcome] = {}
    lines: list[str] = []
    for words, pair in LOW.items():
        alike = found.get(FLASH_IN_FP16) if words.startswith("FP16") else None  # like with like, where it was trained
        judge = alike or flash
        over = ratio(found[pair], judge) if judge is not None and pair in found else None
        if over is not None:
            outcomes[f"{name}, {words}"] = within(over, TWO_TO_FIVE)
            lines.append(f"{name}, {words}: {times(over)} the W1 of flash{' in FP16' if alike else ''}")
    return outcomes, lines


def _faster(name: str, rows: list[Record]) -> _Found:
    seconds = runs(rows, "step_seconds")
    found = _arms(rows)
    arms = [seconds[arm] for arm in found if arm in seconds] if found else []
    if len(arms) < 2:
        return {}, []
    flash, standard = ({seed: median(curve.values()) for seed, curve in arm.curves.items()} for arm in arms)
    faster = estimate_size(standard[seed] / flash[seed] for seed in flash if seed in standard and flash[seed] > 0)
    if faster is None:
        return {}, []
    outcome = True if faster.low >= FASTER else False if faster.high < FASTER else None
    return {name: outcome}, [f"{name}, {rows[0]['device']}: {times(faster)} as fast, whole steps, median of each seed"]


def _on_gpu(rows: Iterable[Record]) -> list[Record]:
    """The rows of studies that trained both on a GPU."""
    groups = studies(row for row in rows if row["device"] != "CPU").values()
    return [row for group in groups if _arms(group) for row in group]


def _arms(rows: Iterable[Record]) -> tuple[str, str] | None:
    """Names of the training under flash and of the same under standard attention, if both ran."""
    pair = next((row for row in rows if (row["changed_from"], row["changed_to"]) == ("standard", "flash")), None)
    return None if pair is None else (pair["arm"], pair["reference"])


def _flash(rows: Sequence[Record], figure: str) -> Trajectory | None:
    return trajectories(rows, figure).get(FLASH)


def _size(found: Estimate | None) -> str:
    return "–" if found is None else f"{found.value:.2g} [{found.low:.2g}, {found.high:.2g}]"


_CLAIMS: tuple[tuple[_Told, str, Callable[[str, list[Record]], _Found]], ...] = (
    (
        {
            "number": "C7",
            "figure": "Fig 7",
            "text": "The difference in the weights grows over training.",
            "paper": "grows in both metrics",
            "anchor": "figure-7",
        },
        "the slopes of W1 and of the largest difference lie above 0",
        _grows,
    ),
    (
        {
            "number": "C8",
            "figure": "Fig 8",
            "text": "Its rate is at most that of another initialisation.",
            "paper": "comparable or less",
            "anchor": "figure-8",
        },
        "the slope of W1 less that of another initialisation, seed by seed, lies at or below 0",
        _at_most_another_initialisation,
    ),
    (
        {
            "number": "C9",
            "figure": "Fig 8",
            "text": "Flash moves the weights 2–5 times less than FP16 training does.",
            "paper": "2–5×",
            "anchor": "figure-8",
        },
        "W1 of low precision over that of flash in the same format, at the end, lies within 2 to 5",
        _less_than_low_precision,
    ),
    (
        {
            "number": "C10",
            "figure": "",
            "text": "Flash is 14% faster, forward and backward, in a text-to-image model.",
            "paper": "14%",
            "anchor": "",
        },
        "a step under standard attention takes at least 1.07 times as long: half of the paper's 14%",
        _faster,
    ),
)
