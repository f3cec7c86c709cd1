"""Image files: one pair for every variant, readable, and the same bytes each time."""

from __future__ import annotations

import dataclasses
import struct
import sys
from xml.etree import ElementTree

import pytest

from assay.report.charts import Chart
from assay.report.figures import SECTIONS, figure_3, figure_4, inputs_figure, length_ratio
from assay.report.layers_figure import layers_figure
from assay.report.shares import attribution_figure
from assay.report.static_figures import file_name, static_figures
from assay.report.training_section import PROGRESS, WEIGHTS
from tests.report.samples import attribution, seeds, study
from tests.report.trained import pairs, trained


def drawn(chart: Chart | None) -> dict[str, bytes]:
    assert chart is not None
    return dict(static_figures([chart]))


def text_of(svg: bytes) -> str:
    return " ".join("".join(each.itertext()) for each in ElementTree.fromstring(svg).iter())


def first(chart: Chart | None) -> Chart:
    assert chart is not None
    return dataclasses.replace(chart, variants=chart.variants[:1])


def test_every_variant_has_an_svg_and_a_png() -> None:
    chart = inputs_figure(study())
    assert chart is not None
    found = drawn(chart)
    assert sorted(found) == sorted(f"{file_name(chart, v)}.{kind}" for v in chart.variants for kind in ("png", "svg"))
    assert "inputs-bf16.svg" in found
    for name, data in found.items():
        if name.endswith("png"):
            width, height = struct.unpack(">II", data[16:24])
            assert (width, height) == (1300, 760)
        else:
            assert "largest error, flash / baseline" in text_of(data)


def test_the_same_records_give_the_same_bytes() -> None:
    chart = first(length_ratio(study()))
    assert drawn(chart) == drawn(chart)


@pytest.mark.parametrize("figure", [figure for section in SECTIONS for figure in section.figures])
def test_all_figures_draw(figure: object) -> None:
    assert callable(figure)
    chart = first(figure(study()))
    svg = drawn(chart)[f"{chart.anchor}.svg"].decode()
    assert chart.title in text_of(svg.encode())
    assert "mathdefault" not in svg


@pytest.mark.parametrize("figure", [figure for section in (WEIGHTS, PROGRESS) for figure in section.figures])
def test_figures_of_training_draw(figure: object) -> None:
    assert callable(figure)
    chart = first(figure(trained()))
    words = text_of(drawn(chart)[f"{chart.anchor}.svg"])
    assert chart.title in words
    assert chart.y_title in words
    for name in [series.name for series in chart.variants[0].series] if len(chart.variants[0].series) > 1 else []:
        assert name in words


def test_layers_that_never_differ_are_drawn_empty() -> None:
    rows = [row | {"layer": "words"} for row in pairs({"flash": (0.0, 0.0)})]
    assert b"<svg" in drawn(layers_figure(rows))["layers.svg"]


def test_attribution_draws_its_steps() -> None:
    chart = attribution_figure([attribution()])
    words = text_of(drawn(chart)["attribution.svg"])
    assert "Running output" in words
    assert "60%" in words


def test_hostile_names_are_drawn_as_text() -> None:
    name = "$\\frac$ </svg><script>\x07🙂" + "x" * 300
    chart = figure_4(
        [*seeds([1.0, 2.0], "error_max", inputs=name), *seeds([1.0, 2.0], "error_max", inputs="../../etc")]
    )
    found = drawn(chart)
    assert all("/" not in file and len(file) < 120 for file in found)
    svg = next(data for name, data in found.items() if name.endswith("svg") and b"frac" in data)
    assert not list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}script"))
    assert "</svg><script>" in text_of(svg)


def test_names_of_files_do_not_clash() -> None:
    chart = figure_3([*seeds([1.0, 2.0], inputs="a/b"), *seeds([1.0, 2.0], inputs="a?b")])
    assert chart is not None
    assert len({file_name(chart, variant) for variant in chart.variants}) == 2


def test_a_figure_without_a_point_is_drawn_empty() -> None:
    chart = figure_3(seeds([1.0]))
    assert b"<svg" in drawn(chart)["figure-3.svg"]
    assert b"<svg" in drawn(figure_3(seeds([0.0, 0.0])))["figure-3.svg"]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'assay\[report\]'"):
        drawn(figure_3(seeds([1.0, 2.0])))
