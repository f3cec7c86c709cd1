"""C7 to C10, the null and the sentence, from rows whose answers are known."""

from __future__ import annotations

from typing import Any

import pytest

from assay.report.claims import Claim, judge, verdict
from assay.report.training_rows import studies, whole
from assay.results.record import Record
from tests.report.trained import FACTORS, SIZES, pairs, run_row, trained


def claim(rows: list[Record], number: str) -> Claim:
    return next(found for found in judge([], rows) if found.number == number)


def with_sizes(**changes: tuple[float, float]) -> list[Record]:
    names = {"flash": "flash", "other": "other initialisation", "fp16": "FP16 ↔ FP32", "bf16": "BF16 ↔ FP32"}
    return pairs(SIZES | {names[name]: size for name, size in changes.items()})


def test_without_rows_nothing_is_measured_and_the_command_is_named() -> None:
    for number in ("C7", "C8", "C9", "C10", "null"):
        assert claim([], number).verdict == "not measured here"
    assert "assay pair quick" in claim([], "C7").because


@pytest.mark.parametrize(
    ("start", "growth", "expected"),
    [(0.0, 1e-6, "holds"), (1e-4, -1e-6, "does not hold"), (1e-4, 0.0, "does not hold")],
)
def test_c7_is_about_the_slope(start: float, growth: float, expected: str) -> None:
    assert claim(with_sizes(flash=(start, growth)), "C7").verdict == expected


def test_c7_tells_both_metrics_with_intervals() -> None:
    found = claim(pairs(), "C7")
    middle = (1.1 * 1.3) ** (1 / 3)  # of the three factors
    assert found.ours[0].startswith(f"text_to_image tiny, W1: {1e-6 * middle:.2g} [")
    assert f"→ {2e-5 * middle:.2g} [" in found.ours[0]
    assert f"{1e-6 * sum(FACTORS) / 3:.2g} [" in found.ours[0]
    assert found.ours[1].startswith("text_to_image tiny, max: ")
    assert found.anchor == "figure-7"


def test_c7_needs_both_metrics() -> None:
    rows = [row | {"max": 1.0 - row["step"] / 100} for row in pairs()]
    assert claim(rows, "C7").verdict == "does not hold"


def test_a_slope_of_seeds_that_disagree_is_undecided() -> None:
    rows = [row | {"w1": row["w1"] * (-1 if row["seed"] else 1) + 1e-4} for row in pairs()]
    assert claim(rows, "C7").verdict == "undecided"


@pytest.mark.parametrize("keep", [lambda row: row["seed"] == 0, lambda row: row["step"] == 1])
def test_one_seed_or_one_step_decides_nothing(keep: Any) -> None:
    for number in ("C7", "C8"):
        found = claim([row for row in pairs() if keep(row)], number)
        assert (found.verdict, found.ours) == ("undecided", ())
        assert "at least two seeds" in found.because


def test_c8_compares_slopes_not_levels() -> None:
    assert claim(with_sizes(flash=(1.0, 1e-6)), "C8").verdict == "holds"
    found = claim(with_sizes(flash=(0.0, 1e-4)), "C8")
    assert found.verdict == "does not hold"
    assert "10× [10, 10] as much" in found.ours[0]


def test_c8_where_another_initialisation_comes_nearer() -> None:
    """A slope below 0 has no ratio; the difference still decides."""
    found = claim(with_sizes(other=(2e-3, -1e-5)), "C8")
    assert found.verdict == "does not hold"
    assert "×" not in found.ours[0]


def test_c9_takes_flash_in_fp16_where_it_was_trained() -> None:
    found = claim(pairs(SIZES | {"flash in FP16": (0.0, 0.75e-6)}), "C9")
    assert found.ours[0] == "text_to_image tiny, FP16: 4× [4, 4] the W1 of flash in FP16"
    assert found.ours[1].endswith("the W1 of flash")


def test_c9_is_judged_for_each_low_precision_and_for_the_control() -> None:
    found = claim(pairs(), "C9")
    assert found.verdict == "holds only when …"
    assert "For text_to_image tiny, FP16 | FP16 against FP32 that skips the same steps." in found.because
    assert "Not for text_to_image tiny, BF16." in found.because
    assert found.ours[0] == "text_to_image tiny, FP16: 3× [3, 3] the W1 of flash"
    assert found.ours[2].endswith("2.5× [2.5, 2.5] the W1 of flash")
    assert claim(with_sizes(bf16=(0.0, 4e-6)), "C9").verdict == "holds"


def test_a_flash_that_changes_nothing_has_no_ratio() -> None:
    assert claim(with_sizes(flash=(0.0, 0.0)), "C9").verdict == "undecided"


def timed(device: str, flash: float) -> list[Record]:
    rows = pairs(device=device)
    for seed, factor in enumerate(FACTORS):
        for step in range(1, 21):
            slow = 50 if step == 1 else 1  # the first step compiles
            rows.append(run_row("base", seed, step, device=device, step_seconds=0.1 * factor * slow))
            rows.append(run_row("flash arm", seed, step, device=device, step_seconds=flash * factor * slow))
    return rows


def test_c10_is_about_a_gpu_with_both() -> None:
    assert claim(timed("CPU", 0.1 / 1.14), "C10").verdict == "not measured here"
    found = claim(timed("A GPU", 0.1 / 1.14), "C10")
    assert found.verdict == "holds"
    assert found.ours == ("text_to_image tiny, A GPU: 1.14× [1.14, 1.14] as fast, whole steps, median of each seed",)
    assert claim(timed("A GPU", 0.1), "C10").verdict == "does not hold"
    shared = claim([row | {"step_seconds": None} for row in timed("A GPU", 0.1)], "C10")
    assert shared.verdict == "not measured here"
    assert "shared the GPU" in shared.because
    only = [row for row in timed("A GPU", 0.1) if row["pair"] != "flash"]
    assert claim(only, "C10").verdict == "not measured here"


def test_studies_never_share_an_interval() -> None:
    rows = pairs() + pairs(SIZES | {"flash": (1e-4, -1e-6)}, model="gpt 1m")
    assert list(studies(rows)) == ["text_to_image tiny", "gpt 1m"]
    found = claim(rows, "C7")
    assert found.verdict == "holds only when …"
    assert "For text_to_image tiny. Not for gpt 1m." in found.because
    other = studies(pairs() + pairs(device="A GPU"))
    assert list(other) == ["text_to_image tiny, CPU", "text_to_image tiny, A GPU"]


def test_a_seed_that_ended_early_is_left_out_and_named() -> None:
    rows = [row for row in pairs() if not (row["pair"] == "flash" and row["seed"] == 2 and row["step"] > 10)]
    kept, short = whole(rows)
    assert short == ["flash, seed 2, ended at step 10 of 20"]
    assert {row["seed"] for row in kept if row["pair"] == "flash"} == {0, 1}
    assert {row["seed"] for row in kept if row["pair"] == "null"} == {0, 1, 2}
    half = [row for row in pairs() if row["step"] < 20 or row["seed"] == 0]
    assert whole(half) == (half, [])  # one whole seed gives no interval: all, as far as they came


def test_the_null_is_that_of_training_too() -> None:
    found = claim(pairs(), "null")
    assert (found.verdict, found.ours) == ("holds", ("the same training twice: 0 in all 9 comparisons",))
    wrong = [row | {"max": 1e-9} if row["pair"] == "null" and row["step"] > 1 else row for row in pairs()]
    found = claim(wrong, "null")
    assert found.verdict == "does not hold"
    assert found.ours == ("the same training twice: up to 1.0e-09, first at step 10",)


def test_the_sentence() -> None:
    words = verdict([], trained())
    assert words.startswith("After 20 steps of training (text_to_image tiny), flash against standard attention: its ")
    assert "0.33× [0.33, 0.33] as much as FP16 ↔ FP32 does" in words
    alone = [row for row in trained() if row["pair"] is None]
    assert verdict([], alone) == f"{len(alone)} points were measured; figures and intervals are below."
