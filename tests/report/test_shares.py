"""The sentence, the bars and the drawing of who owns the deviation."""

from __future__ import annotations

import re

import pytest

from assay.report.attribution_section import attribution_section
from assay.report.estimates import Estimate
from assay.report.shares import attribution_figure, headline, percent
from assay.report.steps import STEPS, explain
from assay.results.record import PLAN_STEPS
from tests.report.samples import attribution, share


def test_percent() -> None:
    assert percent(Estimate(0.614, 0.571, 0.659, 5)) == "61% [57, 66]"
    assert percent(Estimate(-0.04, -0.06, -0.001, 5)) == "−4% [−6, 0]"


def test_headline_names_the_first_owner_and_the_next() -> None:
    assert "".join(headline(attribution())) == (
        "In bf16 with uniform inputs at length 128, the running output owns 61% [59, 63] of the mean square error; "
        "the normalization 20% [18, 22]; the row sum 23% [21, 25]."
    )


def test_headline_leaves_out_what_owns_little() -> None:
    steps = (share("scores", 0.9), share("scale", 0.04), share("output", 0.03), share("maximum", 0.03))
    assert "".join(headline(attribution(steps=steps))).endswith("the scores own 90% [88, 92] of the mean square error.")


def test_headline_without_steps() -> None:
    assert "no step was measured" in "".join(headline(attribution(steps=())))


def test_every_step_of_a_plan_has_words() -> None:
    assert tuple(STEPS) == PLAN_STEPS
    assert explain("a_new_step").label == "a new step"


def test_chart() -> None:
    assert attribution_figure([]) is None
    chart = attribution_figure([attribution(), attribution(format="fp16")])
    assert chart is not None
    assert chart.options() == {"inputs": ("uniform",), "format": ("bf16", "fp16"), "length": ("128",)}
    owns, alone, saves = chart.variants[0].series
    assert owns.x == ("Running output", "Normalization", "Row sum", "Scores")
    assert owns.y == (0.61, 0.2, 0.23, -0.04)
    assert alone.y == (0.1,) * 4
    assert saves.y == (0.05, 0.05, -0.1, 0.05)
    assert owns.low[0] == pytest.approx(0.59)


def test_bars_lie_where_the_values_are() -> None:
    """From −12% (the lowest end of an interval) to 63%: 0 lies at 16% of the width, 61% at 97.33%."""
    html = attribution_section([attribution()])
    assert "--zero:16.00%" in html
    assert '<span class="track owns"><span class="bar" style="left:16.00%;width:81.33%">' in html
    assert 'style="left:94.67%;width:5.33%"' in html  # the whisker, 59% to 63%
    assert '<span class="track saves"><span class="bar" style="left:2.67%;width:13.33%">' in html  # −10%


def test_pipeline_is_in_the_order_of_the_algorithm() -> None:
    html = attribution_section([attribution()])
    labels = re.findall(r'class="label">([^<]+)<', html)
    assert labels == ["Scores", "Row sum", "Running output", "Normalization"]
    shares = dict(zip(labels, re.findall(r"--share:([\d.]+)", html), strict=True))
    assert shares == {"Scores": "0.000", "Row sum": "0.377", "Running output": "1.000", "Normalization": "0.328"}


def test_several_settings_can_be_chosen() -> None:
    assert "<select" not in attribution_section([attribution()])
    html = attribution_section([attribution(), attribution(setting="order fa2"), attribution(inputs="normal")])
    options = re.findall(r"<option value=\"\d\">([^<]+)<", html)
    assert options == [
        "uniform inputs, bf16, length 128: order fa1, block 50×50, CPU",
        "uniform inputs, bf16, length 128: order fa2",
        "normal inputs, bf16, length 128",
    ]
    assert html.count("data-panel=") == 3


def test_steps_that_own_nothing() -> None:
    html = attribution_section([attribution(steps=(share("scores", 0.0, 0.0, 0.0),))])
    assert "nan" not in html
    assert "--share:0.000" in html
