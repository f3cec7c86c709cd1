"""Claims and attributions from records whose answers are known."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from assay.report.attribution import attribute, in_words, table
from assay.report.claims import Claim, judge, verdict
from assay.results.record import Record
from tests.results.records import make_record

SEEDS = range(5)


def row(sweep: str, seed: int, **changes: Any) -> Record:
    fmt = changes.get("format", "bf16")
    known = {
        "sweep": sweep, "seed": seed, "heads": 2, "causal": False,
        "variant": "flash", "inputs": "uniform", "format": fmt, "length": 1024,
        "plan": f"uniform {fmt}", "baseline": f"eager {fmt}", "null_max": 0.0, "golden_rms": 1.0,
        "id": f"{sweep}{seed}{sorted(changes.items(), key=str)}",
    }  # fmt: skip
    return make_record(**known | changes)


def wobble(seed: int) -> float:
    return 1 + 0.01 * (seed - 2)


def claim(rows: list[Record], number: str) -> Claim:
    return next(found for found in judge(rows) if found.number == number)


def test_without_records_nothing_is_judged() -> None:
    assert {c.verdict for c in judge([])} == {"not measured here"}
    assert "assay sweep precision" in claim([], "C1").because
    assert [c.number for c in judge([])] == ["C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "null"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1e-2, 1e-3, 1e-7, 1e-15), "holds"),
        ((1e-2, 1e-2, 1e-7, 1e-15), "does not hold"),
        ((1e-2, 2e-2, 1e-7, 1e-15), "does not hold"),
        ((1e-2, 1e-3), "undecided"),  # FP32 and FP64 were not measured
    ],
)
def test_c1_falls_with_the_mantissa(sizes: tuple[float, ...], expected: str) -> None:
    rows = [
        row("precision", s, format=f, difference_max=size * wobble(s))
        for f, size in zip(("bf16", "fp16", "fp32", "fp64"), sizes, strict=False)
        for s in SEEDS
    ]
    found = claim(rows, "C1")
    assert found.verdict == expected
    assert "bf16 1.0e-02" in found.ours[0]


def test_c2_names_the_settings_in_which_it_holds() -> None:
    rows = [
        row("precision", s, inputs=i, plan=p, error_max=ratio * wobble(s), baseline_error_max=1.0)
        for (i, p, ratio), s in itertools.product(
            [("uniform", "uniform bf16", 9.5), ("normal", "uniform bf16", 2.0), ("uniform", "shipped bf16", 0.9)], SEEDS
        )
    ]
    found = claim(rows, "C2")
    assert found.verdict == "holds only when …"
    assert found.because.startswith("For uniform, N 1024. Not for normal, N 1024.")
    assert "uniform, every step in bf16 9.5× [" in found.because
    assert "uniform, as shipped 0.9× [" in found.because
    assert any("normal" in line and "2× [" in line for line in found.ours)
    assert claim([r for r in rows if r["plan"] == "shipped bf16"], "C2").verdict == "undecided"
    assert claim([r for r in rows if r["inputs"] == "normal"], "C2").verdict == "does not hold"
    assert claim([r for r in rows if r["error_max"] > 5], "C2").verdict == "holds"
    words = verdict(rows)
    assert "9.5× [" in words
    assert "2× [" in words
    assert "0.9× [" in words


def test_settings_never_share_an_interval() -> None:
    rows = [
        row("precision", s, heads=heads, error_max=ratio * wobble(s), baseline_error_max=1.0)
        for (heads, ratio), s in itertools.product([(2, 9.5), (4, 2.0)], SEEDS)
    ]
    found = claim(rows, "C2")
    assert found.verdict == "holds only when …"
    assert [line.split(":")[0] for line in found.ours] == [
        "uniform, 2 heads, every step in bf16",
        "uniform, 4 heads, every step in bf16",
    ]


def test_too_few_seeds_decide_nothing() -> None:
    found = claim([row("precision", 0, error_max=9.5, baseline_error_max=1.0)], "C2")
    assert found.verdict == "undecided"
    assert "too few seeds" in found.because
    wide = [row("precision", s, error_max=x, baseline_error_max=1.0) for s, x in enumerate((3.0, 30.0))]
    assert claim(wide, "C2").verdict == "undecided"


@pytest.mark.parametrize("sweep", ["blocks", "steps", "kernels"])
def test_the_verdict_is_a_sentence_whatever_is_there(sweep: str) -> None:
    assert verdict([row(sweep, s) for s in SEEDS]) == "5 points were measured; figures and intervals are below."


def test_c3_is_about_all_three_figures_and_every_kind_of_inputs() -> None:
    def measured(power: float) -> list[Record]:
        return [
            row("length", s, length=n, inputs="normal" if power < 0 else "uniform",
                **{f"difference_{f}": n**power * wobble(s) for f in ("max", "mean", "std", "rmse")})
            for n, s in itertools.product((256, 1024, 4096), SEEDS)
        ]  # fmt: skip

    growing, falling = measured(0.5), measured(-0.5)
    assert claim(growing, "C3").verdict == "holds"
    assert "max +0.50 [+0.50, +0.50]" in claim(growing, "C3").ours[0]
    assert claim(falling, "C3").verdict == "does not hold"
    both = claim(growing + falling, "C3")
    assert both.verdict == "holds only when …"
    assert both.because.startswith("For uniform. Not for normal.")


def blocks(size: Any) -> list[Record]:
    """Paper, swapped and square blocks for three SRAM sizes; `size` of the difference from rows and columns."""
    found = []
    for (shape, rows, columns), s in itertools.product(
        [("paper", 64, 64), ("swapped", 64, 64), ("square", 64, 64),
         ("paper", 64, 256), ("swapped", 256, 64), ("square", 128, 128),
         ("paper", 64, 576), ("swapped", 576, 64), ("square", 192, 192)],
        SEEDS,
    ):  # fmt: skip
        difference = size(rows, columns) * wobble(s)
        found.append(
            row("blocks", s, block_shape=shape, block_rows=rows, block_columns=columns, difference_max=difference)
        )
    return found


def test_c4_to_c6_where_fewer_columns_mean_more_rescaling() -> None:
    rows = blocks(lambda rows, columns: columns**-0.5)
    swapped, square, larger = (claim(rows, number) for number in ("C4", "C5", "C6"))
    assert (swapped.verdict, square.verdict, larger.verdict) == ("holds", "does not hold", "holds")
    # √(256/64) = 2 and √(576/64) = 3; where the two shapes are the same there is nothing to compare
    assert f"{math.sqrt(6):.3g}×" in swapped.ours[0]
    # √(256/128) = √2 and √(576/192) = √3
    assert f"{6**0.25:.3g}×" in square.ours[0]
    assert larger.ours[0] == "uniform, bf16: as the area to the power of -0.50 [-0.50, -0.50]"


def test_c4_to_c6_where_the_block_does_not_matter() -> None:
    rows = blocks(lambda rows, columns: 1.0)
    for r in rows:  # seeds that differ between the shapes
        r["difference_max"] *= 1 + 0.01 * math.sin(7 * r["seed"] + r["block_columns"])
    assert [claim(rows, number).verdict for number in ("C4", "C5", "C6")] == ["does not hold", "holds", "does not hold"]


def test_the_null() -> None:
    rows = [row("precision", s) for s in SEEDS]
    assert claim(rows, "null").verdict == "holds"
    rows[3]["null_max"] = 1e-9
    assert claim(rows, "null").verdict == "does not hold"


def steps_of(seed: int, shares: dict[str, float], together: float = 0.0) -> list[Record]:
    """Mean square errors that add up, and more while both a and b are low."""

    def error(low: set[str]) -> float:
        return sum(shares[s] for s in low) + (together if {"a", "b"} <= low else 0.0) + 1e-12

    names = set(shares)
    made: list[tuple[str, str | None, set[str], int | None, int | None]] = [
        ("low", None, names, None, None),
        ("high", None, set(), None, None),
    ]
    made += [("lower", s, {s}, None, None) for s in sorted(names)]
    made += [("raise", s, names - {s}, None, None) for s in sorted(names)]
    for path, order in enumerate((sorted(names), sorted(names, reverse=True))):
        made += [("path", s, names - set(order[: i + 1]), path, i + 1) for i, s in enumerate(order)]
    return [
        row("steps", seed, role=role, step=step, path=path, position=position, plan=f"plan {role}",
            error_rmse=math.sqrt(error(low)) * wobble(seed))
        for role, step, low, path, position in made
    ]  # fmt: skip


def test_independent_errors_are_owned_by_their_steps() -> None:
    rows = [r for s in SEEDS for r in steps_of(s, {"a": 0.7, "b": 0.25, "c": 0.05})]
    (found,) = attribute(rows)
    assert [share.step for share in found.steps] == ["a", "b", "c"]
    for share, expected in zip(found.steps, (0.7, 0.25, 0.05), strict=True):
        for figure in (share.owns, share.alone, share.saves):
            assert figure.value == pytest.approx(expected, abs=1e-9)
            assert figure.low <= figure.value <= figure.high
    assert in_words(found) == "a 70%, b 25% own 95% of the mean square error."
    assert table(found).rows[0][0] == "a"


def test_what_two_steps_do_together_is_shared_between_them() -> None:
    rows = [r for s in SEEDS for r in steps_of(s, {"a": 0.3, "b": 0.1, "c": 0.2}, together=0.4)]
    (found,) = attribute(rows)
    owns = {share.step: share.owns.value for share in found.steps}
    assert owns == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    assert sum(owns.values()) == pytest.approx(1)
    alone = {share.step: share.alone.value for share in found.steps}
    assert alone == pytest.approx({"a": 0.3, "b": 0.1, "c": 0.2})
    saves = {share.step: share.saves.value for share in found.steps}
    assert saves == pytest.approx({"a": 0.7, "b": 0.5, "c": 0.2})


def test_half_measured_seeds_are_left_out() -> None:
    rows = [r for s in SEEDS for r in steps_of(s, {"a": 0.7, "b": 0.3})]
    assert attribute(rows[:-1])[0].low_rmse.seeds == 4
    assert attribute(steps_of(0, {"a": 0.7, "b": 0.3})) == []  # one seed has no interval
