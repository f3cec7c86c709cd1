"""Figures as data, from rows made by hand."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from assay.report import figures
from assay.report.charts import Chart, Variant
from assay.report.choices import family, latest, mantissa_bits
from assay.report.figures import SECTIONS
from assay.results.record import Record
from tests.report.samples import row, seeds, study


def chosen(chart: Chart | None, **choices: str) -> Variant:
    """The one variant with these choices."""
    assert chart is not None
    found = [v for v in chart.variants if all(dict(v.choices)[name] == value for name, value in choices.items())]
    assert len(found) == 1, [v.choices for v in chart.variants]
    return found[0]


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("uniform bf16", "bf16", "uniform"),
        ("uniform fp32 with row_sum=fp32", "fp32", "uniform with row_sum=fp32"),
        ("uniform bf16, state in fp32", "bf16", "uniform, state in fp32 or wider"),
        ("uniform fp64, state in fp64", "fp64", "uniform, state in fp32 or wider"),
        ("bf16", "bf16", "bf16"),
        ("fa3 fp8_e4m3", "bf16", "fa3 fp8_e4m3"),
        (None, "bf16", ""),
    ],
)
def test_family(name: str | None, format: str, expected: str) -> None:
    assert family(name, format) == expected


def test_formats_are_in_the_order_of_their_mantissas() -> None:
    shuffled = ["fp64", "bf16", "fp8_e4m3", "fp32", "fp8_e5m2", "tf32", "fp16"]
    assert sorted(shuffled, key=mantissa_bits) == ["fp8_e5m2", "fp8_e4m3", "bf16", "fp16", "tf32", "fp32", "fp64"]


def test_figure_3_is_the_geometric_mean_with_its_interval() -> None:
    rows = seeds([1.0, 2.0, 4.0], format="fp16") + seeds([8.0, 8.0, 8.0], format="bf16")
    (variant,) = figures.figure_3(rows).variants  # type: ignore[union-attr]
    (series,) = variant.series
    assert series.x == ("bf16", "fp16")
    assert series.y == pytest.approx((8.0, 2.0))
    half = stats.t.ppf(0.975, 2) * math.log(2) / math.sqrt(3)  # the logarithms are 0, log 2, 2 log 2
    assert series.low == pytest.approx((8.0, 2 * math.exp(-half)), rel=1e-4)
    assert series.high == pytest.approx((8.0, 2 * math.exp(half)), rel=1e-4)
    assert series.seeds == (3, 3)


def test_an_overflow_is_named_and_keeps_its_place() -> None:
    rows = seeds([1.0, 2.0]) + seeds([math.inf, 3.0], format="fp8_e5m2") + seeds([math.nan, 3.0], format="fp16")
    chart = figures.figure_3(rows)
    assert chart is not None
    assert chart.categories == ("fp8_e5m2", "bf16", "fp16")
    (variant,) = chart.variants
    assert variant.series[0].x == ("bf16",)
    assert next(note for note in variant.notes if "not finite" in note).endswith(": fp8_e5m2; fp16.")


def test_a_single_seed_is_named_too() -> None:
    (variant,) = figures.figure_3(seeds([1.0, 2.0]) + seeds([1.0], format="fp16")).variants  # type: ignore[union-attr]
    assert variant.series[0].x == ("bf16",)
    assert variant.notes == ("Not drawn, because one seed gives no interval: fp16.",)


def test_a_zero_is_drawn_and_told() -> None:
    (variant,) = figures.figure_3(seeds([0.0, 0.0])).variants  # type: ignore[union-attr]
    assert variant.series[0].y == (0.0,)
    assert variant.notes == ("Exactly 0, which a log axis cannot show: bf16.",)


def test_figure_4_tells_the_ratio_of_each_seed() -> None:
    rows = [
        row(seed=seed, error_max=over * under, baseline_error_max=under)
        for seed, (over, under) in enumerate([(2.0, 1.0), (8.0, 100.0)])
    ]
    (variant,) = figures.figure_4(rows).variants  # type: ignore[union-attr]
    flash, baseline = variant.series
    assert (flash.name, baseline.name) == ("flash", "baseline")
    assert flash.y == pytest.approx((math.sqrt(2 * 800),))
    assert baseline.y == pytest.approx((10.0,))
    assert flash.colour != baseline.colour
    # The geometric mean of 2 and 8; the ratio of the means would be the same, that of the arithmetic means not.
    assert flash.extra[0].startswith("Flash over baseline: 4 [")
    assert variant.notes[0].startswith("Flash over baseline: bf16 4 [")


def test_what_varies_is_a_choice_and_never_mixed() -> None:
    rows = [
        row(difference_max=value + seed, seed=seed, inputs=inputs, device=device)
        for (inputs, device), value in {
            ("normal", "CPU"): 1.0,
            ("uniform", "CPU"): 10.0,
            ("uniform", "GPU"): 30.0,
        }.items()
        for seed in (0, 2)
    ]
    chart = figures.figure_3(rows)
    assert chart is not None
    assert chart.options() == {"inputs": ("uniform", "normal"), "device": ("CPU", "GPU")}
    assert chosen(chart, inputs="uniform", device="GPU").series[0].y == pytest.approx((math.sqrt(30 * 32),))
    assert chosen(chart, inputs="normal").series[0].y == pytest.approx((math.sqrt(3),))
    assert "length 128" in chart.variants[0].setting
    assert "inputs" not in chart.variants[0].setting


def test_what_follows_from_another_choice_is_no_choice() -> None:
    rows = seeds([1.0, 2.0], plan="uniform bf16") + seeds([1.0, 2.0], plan="shipped bf16", length=256)
    chart = figures.figure_3(rows)
    assert chart is not None
    assert chart.options() == {"plan": ("uniform", "shipped")}
    assert "length 256" in chosen(chart, plan="shipped").setting


def test_a_repeat_is_no_new_seed() -> None:
    old, new = row(difference_max=1.0, time="2026-01-01"), row(difference_max=2.0, time="2026-01-02")
    assert latest([new, old]) == [new]
    assert latest([old, row(difference_max=1.0, seed=1)]) == [old, row(difference_max=1.0, seed=1)]
    (variant,) = figures.figure_3([new, old, row(difference_max=2.0, seed=1)]).variants  # type: ignore[union-attr]
    assert variant.series[0].y == pytest.approx((2.0,))
    assert variant.series[0].seeds == (2,)


def test_figure_5_has_lengths_in_order_and_mean_beside_deviation() -> None:
    rows: list[Record] = []
    for length in (512, 128, 256):
        for seed in (0, 1):
            values = {"difference_max": 3.0, "difference_mean": 1.0, "difference_std": 2.0}
            rows.append(row(sweep="length", length=length, seed=seed, **values))
    (a,) = figures.figure_5a(rows).variants  # type: ignore[union-attr]
    assert a.series[0].x == (128.0, 256.0, 512.0)
    (b,) = figures.figure_5b(rows).variants  # type: ignore[union-attr]
    assert {series.name: series.y for series in b.series} == {
        "bf16, mean": pytest.approx((1.0,) * 3),
        "bf16, standard deviation": pytest.approx((2.0,) * 3),
    }
    assert b.series[0].colour == b.series[1].colour
    assert b.series[0].dash != b.series[1].dash


def test_length_ratio_has_a_line_for_every_plan() -> None:
    variant = chosen(figures.length_ratio(study()), inputs="uniform")
    found = {series.name: series.y for series in variant.series}
    assert found["uniform, bf16"] == pytest.approx((8, 16, 32))
    assert found["shipped, bf16"] == pytest.approx((0.5, 1, 2))
    assert len(found) == 6


def test_figure_6_pairs_shapes_by_area() -> None:
    variant = chosen(figures.figure_6a(study()), inputs="uniform", plan="uniform", format="fp16")
    assert variant.series[0].x == (1024.0, 2048.0, 4096.0)
    assert [series.name for series in variant.series] == ["paper", "swapped"]
    assert [s.name for s in figures.figure_6b(study()).variants[0].series] == ["paper", "square"]  # type: ignore[union-attr]
    variant = chosen(figures.figure_6c(study()), inputs="uniform", plan="uniform")
    assert {series.name for series in variant.series} == {"bf16", "fp16", "fp32"}


def test_figure_6a_needs_both_shapes() -> None:
    paper = [r for r in study() if r["block_shape"] != "swapped"]
    assert figures.figure_6a(paper) is None
    assert figures.figure_6c(paper) is not None


def test_ratio_charts_start_at_one() -> None:
    inputs = figures.inputs_figure(study())
    assert inputs is not None
    assert (inputs.reference, inputs.categories) == (1.0, ("uniform", "normal"))
    variant = chosen(inputs, format="bf16")
    assert [s.name for s in variant.series] == ["uniform", "shipped"]
    assert variant.series[0].y == pytest.approx((8, 2))
    assert variant.series[1].y == pytest.approx((0.5, 0.5))
    kernels = figures.kernels_figure(study())
    assert kernels is not None
    assert [s.name for s in kernels.variants[0].series] == ["output", "dq", "dk", "dv"]
    assert kernels.variants[0].series[0].y == pytest.approx((0.5 * (1.1 * 1.2) ** (1 / 3),) * 2)


def test_kernels_on_captured_inputs_go_by_their_names() -> None:
    """Though one of them rounds as an emulated plan does."""
    kernel = {"variant": "assay", "order": None, "block_rows": None, "block_columns": None, "block_shape": None}
    captured = {"sweep": "inputs", "inputs": "file:worst@0", "baseline_error_max": 1.0, "plan": "shipped bf16"}
    rows = seeds((2.0, 2.0), "error_max", **captured) + seeds((4.0, 4.0), "error_max", **captured, **kernel)
    (variant,) = figures.inputs_figure(rows).variants  # type: ignore[union-attr]
    assert {series.name: series.y for series in variant.series} == {"shipped": (2.0,), "assay": (4.0,)}


def test_a_baseline_without_error_gives_no_ratio() -> None:
    rows = [row(sweep="inputs", seed=s, error_max=1.0, baseline_error_max=0.0) for s in (0, 1)]
    (variant,) = figures.inputs_figure(rows).variants  # type: ignore[union-attr]
    assert variant.series == ()
    assert "division by 0" in variant.notes[0]


def test_colours_of_formats_are_the_same_everywhere() -> None:
    all_charts = [figure(study()) for section in SECTIONS for figure in section.figures]
    assert all(chart is not None for chart in all_charts)
    seen: dict[str, set[int]] = {}
    for chart in (figures.figure_5a(study()), figures.figure_6c(study())):
        assert chart is not None
        for series in chart.variants[0].series:
            seen.setdefault(series.name.split(",")[0], set()).add(series.colour)
    assert all(len(colours) == 1 for colours in seen.values())
    assert len(set().union(*seen.values())) == len(seen) == 3


def test_without_its_sweep_there_is_no_figure() -> None:
    for section in SECTIONS:
        for figure in section.figures:
            assert figure([row(sweep="another")]) is None
            assert figure([]) is None
