"""What a study of pairs says in words."""

from __future__ import annotations

import math

from assay.report.pair_summary import nulls, pair_table, verdicts
from assay.results.record import Record
from assay.results.training_record import TRAINING

STEPS = (1, 10, 20)


def rows(pair: str, growth: float, *, start: float = 0.0, seeds: int = 3, changed: str = "precision") -> list[Record]:
    """A pair that grows by `growth` a step, by 10% more with every seed."""
    found = []
    for seed in range(seeds):
        for step in STEPS:
            w1 = (start + growth * step) * (1 + 0.1 * seed)
            record: Record = dict.fromkeys(TRAINING.columns)
            place = {"pair": pair, "changed": changed, "kind": "weights", "layer": "", "seed": seed, "step": step}
            found.append(record | place | {"w1": w1, "max": 10 * w1, "relative_rmse": 2 * w1})
    return found


def test_a_line_for_each_pair() -> None:
    table = pair_table([*rows("flash", 0.1), *rows("alone", 0.2, seeds=1), *rows("null", 0.0, changed="")])
    assert [line[:3] for line in table.rows] == [("flash", "20", "3"), ("alone", "20", "1"), ("null", "20", "3")]
    flash, alone, null = (dict(zip(table.columns, line, strict=True)) for line in table.rows)
    assert flash["W1"].startswith("2.2 [")
    assert flash["W1 a step"].startswith("0.11 [")
    assert flash["max"].startswith("22 [")
    assert flash["RMS / spread"].startswith("4.4 [")
    assert {alone[name] for name in table.columns[3:]} == {"–"}
    assert null["W1"] == "0 [0, 0]"
    assert pair_table([]).rows == ()


def test_a_verdict_for_each_arm() -> None:
    found = verdicts(
        [
            *rows("null", 0.0, changed=""),
            *rows("flash", 0.01),
            *rows("worse", 1.0),
            *rows("other initialisation", 0.1, start=5.0),
            *rows("FP16 ↔ FP32", 0.03),
            *rows("BF16 ↔ FP32", 0.01),
        ]
    )
    flash, worse = found
    assert flash.startswith("flash: its weights drift less, 0.1× [0.1, 0.1] as much as another initialisation's; ")
    assert "it moves the weights less, 0.029× [0.029, 0.029] as much as another initialisation does" in flash
    assert "it moves the weights less, 0.33× [0.33, 0.33] as much as FP16 ↔ FP32 does" in flash
    assert flash.endswith("it moves the weights 1× [1, 1] as much as BF16 ↔ FP32 does: no clear difference.")
    assert worse.startswith("worse: its weights drift more, 10× [10, 10] as much as another initialisation's; ")


def test_what_cannot_be_said_is_not() -> None:
    assert verdicts(rows("flash", 0.01)) == ["flash: nothing to compare it with was measured."]
    falling = rows("other initialisation", -0.1, start=5.0)
    assert verdicts([*rows("flash", 0.01), *falling]) == [
        "flash: whether its weights drift as much as another initialisation's cannot be said; it moves the weights "
        "less, 0.067× [0.067, 0.067] as much as another initialisation does."  # 0.2 of 3
    ]
    assert verdicts([]) == []


def test_nulls_that_are_not_0() -> None:
    good = [*rows("null", 0.0, changed=""), *rows("my null", 0.0, changed=""), *rows("flash", 0.1)]
    run: Record = dict.fromkeys(TRAINING.columns)
    assert nulls([*good, run | {"kind": "run"}]) == []
    for pair in ("null", "my null"):
        for wrong in (1e-30, math.nan):
            spoilt = [row | {"max": wrong} if row["pair"] == pair and row["step"] == 10 else row for row in good]
            assert [(row["pair"], row["step"]) for row in nulls(spoilt)] == [(pair, 10)] * 3
