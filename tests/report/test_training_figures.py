"""Figures 7 and 8, the layers, the losses: values that a pencil can check."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from assay.report.charts import Chart, Series
from assay.report.layers_figure import layer_of, layers_figure
from assay.report.pair_tables import slope_tables
from assay.report.training_figures import (
    MOST,
    figure_7,
    figure_8,
    held_out_figure,
    loss_figure,
    ratio_figure,
    scale_figure,
    skipped_figure,
)
from assay.report.training_section import findings
from assay.results.record import Record
from tests.report.trained import FACTORS, pair_row, pairs, run_row, trained

MIDDLE = math.prod(FACTORS) ** (1 / 3)


def series_of(chart: Chart | None, name: str, variant: int = 0) -> Series:
    assert chart is not None
    return next(series for series in chart.variants[variant].series if series.name == name)


def test_figure_7_is_the_geometric_mean_with_its_interval() -> None:
    found = series_of(figure_7(trained()), "W1")
    assert found.x == (10.0, 20.0)  # step 1 has hardly moved, and would take the axis for itself
    assert found.y == pytest.approx([1e-6 * step * MIDDLE for step in (10, 20)])
    logs = [math.log(factor) for factor in FACTORS]
    half = stats.t.ppf(0.975, 2) * stats.sem(logs)
    assert found.high[1] == pytest.approx(2e-5 * MIDDLE * math.exp(half), rel=1e-4)
    assert found.seeds == (3, 3)
    assert series_of(figure_7(trained()), "max").y == pytest.approx([1e-4 * step * MIDDLE for step in (10, 20)])
    two = [row for row in trained() if row["step"] != 20]
    assert series_of(figure_7(two), "W1").x == (1.0, 10.0)


def test_low_precision_over_flash() -> None:
    chart = ratio_figure(trained())
    assert chart is not None
    assert [series.name for series in chart.variants[0].series][-1] == "other initialisation / flash"
    found = series_of(chart, "BF16 ↔ FP32 / flash")
    assert found.x == (10.0, 20.0)
    assert found.y == pytest.approx([1.2, 1.2])  # 1.2e-6 a step over 1e-6, with every seed
    flash_alone = [row for row in trained() if row["pair"] in (None, "flash")]
    assert ratio_figure(flash_alone) is None
    never = [row | {"w1": 0.0} if row["pair"] == "flash" else row for row in trained()]
    chart = ratio_figure(never)
    assert chart is None or not any(series.name.endswith("/ flash") for series in chart.variants[0].series)


def test_figure_8_has_every_pair_but_the_null() -> None:
    chart = figure_8(trained())
    assert chart is not None
    assert chart.y_log
    assert chart.band
    assert chart.options() == {"compared": ("weights", "gradients", "activations")}
    names = [series.name for series in chart.variants[0].series]
    assert names == ["flash", "other initialisation", "FP16 ↔ FP32", "BF16 ↔ FP32", "FP16 ↔ FP32, same steps",
                     "skipped steps alone"]  # fmt: skip
    assert chart.variants[0].notes == ("Exactly 0, which a log axis cannot show: skipped steps alone at every step.",)
    backwards = figure_8(trained()[::-1])
    assert backwards is not None
    assert [series.name for series in backwards.variants[0].series] == names


def test_more_pairs_than_colours_differ_in_their_dash() -> None:
    chart = figure_8(pairs({f"pair {i}": (0.0, 1e-6 * (i + 1)) for i in range(11)}))
    assert chart is not None
    styles = {(series.colour, series.dash) for series in chart.variants[0].series}
    assert len(styles) == 11


def test_what_is_not_drawn_is_told() -> None:
    rows = [row for row in pairs() if row["seed"] == 0 or row["step"] < 20]
    rows += [pair_row("burst", seed, step, math.nan) for seed in (0, 1) for step in (1, 10)]
    chart = figure_8(rows)
    assert chart is not None
    told = " ".join(chart.variants[0].notes)
    assert "not finite: burst at every step." in told
    assert "one seed gives no interval: flash at step 20;" in told


def test_two_studies_are_two_choices() -> None:
    chart = figure_7(pairs() + pairs(model="gpt 1m"))
    assert chart is not None
    assert chart.options() == {"training": ("text_to_image tiny", "gpt 1m")}
    assert "gpt 1m" in chart.variants[1].setting


def test_a_seed_that_ended_early_is_told() -> None:
    rows = [row for row in pairs() if not (row["seed"] == 2 and row["step"] > 10)]
    chart = figure_7(rows)
    assert chart is not None
    assert "flash, seed 2, ended at step 10 of 20" in chart.variants[0].notes[0]
    assert series_of(chart, "W1").seeds == (2, 2)


def test_losses_are_drawn_for_every_training() -> None:
    chart = loss_figure(trained())
    assert chart is not None
    assert not chart.y_log
    assert [series.name for series in chart.variants[0].series] == ["base", "flash arm", "fp16"]
    assert series_of(chart, "base").y[:2] == pytest.approx([1.95 * MIDDLE, 1.9 * MIDDLE])
    assert series_of(held_out_figure(trained()), "base").y == pytest.approx([2.9, 2.0, 1.0])


def test_long_losses_are_means_of_steps() -> None:
    rows = [run_row("base", seed, step, loss=float(step)) for seed in (0, 1) for step in range(1, 2 * MOST + 1)]
    chart = loss_figure(rows)
    found = series_of(chart, "base")
    assert len(found.x) == MOST
    assert found.x[0] == 2
    assert found.y[0] == pytest.approx(1.5)
    assert found.x[-1] == 2 * MOST
    assert found.y[-1] == pytest.approx(2 * MOST - 0.5)
    assert chart is not None
    assert "mean of 2 steps" in chart.caption


def test_scale_and_skipped_are_those_of_the_scaled() -> None:
    scale, skipped = scale_figure(trained()), skipped_figure(trained())
    assert scale is not None
    assert skipped is not None
    assert [series.name for series in scale.variants[0].series] == ["fp16"]
    assert series_of(scale, "fp16").y[3:5] == pytest.approx([65536, 32768])
    assert series_of(skipped, "fp16").y[3:5] == (0.0, 1.0)
    assert skipped.variants[0].notes == ()  # a linear axis shows 0
    plain = [row for row in trained() if row["arm"] != "fp16"]
    assert scale_figure(plain) is None
    assert skipped_figure(plain) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.0.self_attention.q.weight", "block 0, self attention"),
        ("blocks.11.offsets", "block 11, offsets"),
        ("time_in.bias", "time in"),
        ("word_positions", "word positions"),
        ("weight", "weight"),
    ],
)
def test_layers_are_parts_of_the_model(name: str, expected: str) -> None:
    assert layer_of(name) == expected


def test_tensors_of_a_layer_are_one_by_their_counts() -> None:
    rows = []
    for seed in (0, 1):
        for layer, count, rmse, std in (("blocks.0.mlp.up", 300, 0.3, 2.0), ("blocks.0.mlp.down", 100, 0.5, 1.0)):
            rows.append(pair_row("flash", seed, 1, 1.0, layer=layer, count=count, rmse=rmse, std=std))
    chart = layers_figure(rows)
    expected = math.sqrt((300 * 0.09 + 100 * 0.25) / (300 * 4 + 100 * 1))
    assert series_of(chart, "block 0, mlp").y == pytest.approx([expected])


def test_layers_are_in_the_order_of_the_model_and_flash_is_first() -> None:
    chart = layers_figure(trained()[::-1])
    assert chart is not None
    assert chart.kind == "heat"
    assert [series.name for series in chart.variants[0].series] == ["words", "block 0, mlp", "block 10, mlp", "last"]
    assert chart.options()["pair"][0] == "flash"
    assert "null" not in chart.options()["pair"]


def test_a_layer_without_spread_is_told() -> None:
    rows = [pair_row("flash", seed, step, 1e-3, layer="norm", std=0.0) for seed in (0, 1) for step in (1, 10)]
    rows += [pair_row("flash", seed, step, 0.0, layer="words") for seed in (0, 1) for step in (1, 10)]
    chart = layers_figure(rows)
    assert chart is not None
    told = " ".join(chart.variants[0].notes)
    assert "norm." in told
    assert "exactly 0" in told
    assert [series.name for series in chart.variants[0].series] == ["words"]


def test_slope_table() -> None:
    (table,) = slope_tables(trained())
    lines = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(lines)[:3] == ["null", "flash", "other initialisation"]
    assert lines["FP16 ↔ FP32"]["W1 / flash"] == "3× [3, 3]"
    assert lines["other initialisation"]["slope / flash"] == "10× [10, 10]"
    assert lines["flash"]["W1 / flash"] == "–"
    assert lines["flash"]["differs in"] == "attention: flash"
    assert lines["flash"]["W1 a step"].startswith(f"{1e-6 * sum(FACTORS) / 3:.2g} [")
    assert "step 20" in table.title


def test_findings_name_the_study_where_there_are_several() -> None:
    assert findings(trained())[0].startswith("flash: its weights drift less")
    assert findings(pairs() + pairs(model="gpt 1m"))[-1].startswith("gpt 1m, ")


@pytest.mark.parametrize("rows", [[], [run_row("base", 0, 1)], pairs({"mine": (0.0, 1e-6)})])
def test_what_is_not_there_is_not_drawn(rows: list[Record]) -> None:
    assert figure_7(rows) is None
    assert scale_figure(rows) is None
    assert layers_figure(rows) is None
