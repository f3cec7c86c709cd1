from __future__ import annotations

import json

import pytest

from assay.bench.figures import Figure, Point, fastest, median
from tests.bench.samples import point


def named(made: Point, name: str) -> Figure:
    return next(figure for figure in made.figures if figure.contender == name)


def test_figures_follow_from_the_medians() -> None:
    made = point({"assay": [0.002, 0.001, 0.9], "SDPA cuDNN": [0.001], "standard": [0.004]})
    ours = named(made, "assay")
    assert ours.seconds == 0.002
    assert made.ceiling == 2e12 / 0.002
    assert made.flop_rate(ours) == 4 * 2 * 4 * 512 * 512 * 128 / 2 / 0.002
    assert made.ceiling_share(ours) == pytest.approx(4 * 2 * 4 * 512 * 512 * 128 / 2 / 2e12)
    assert made.token_rate(ours) == 2 * 512 / 0.002
    assert made.over_standard(ours) == 2.0
    assert made.over_best_other(ours) == 0.5
    assert made.over_best_other(named(made, "SDPA cuDNN")) == 2.0
    best = made.best_other(ours)
    assert best is not None
    assert best.contender == "SDPA cuDNN"


def test_what_was_not_measured_is_none_and_no_error() -> None:
    made = point({"assay": [], "standard": []})
    ours = named(made, "assay")
    made.ceiling_samples.clear()
    assert median([]) is None
    assert fastest(made.figures) is None
    for value in (
        ours.seconds,
        ours.graph_seconds,
        made.ceiling,
        made.flop_rate(ours),
        made.ceiling_share(ours),
        made.token_rate(ours),
        made.over_standard(ours),
        made.over_best_other(ours),
    ):
        assert value is None


def test_alone_there_is_nobody_to_compare_with() -> None:
    made = point({"assay": [0.001]})
    assert made.over_standard(made.figures[0]) is None
    assert made.over_best_other(made.figures[0]) is None


def test_as_json_everything_is_there() -> None:
    made = point({"assay": [0.001], "standard": [0.004]})
    made.figures[0].graph_samples.append(0.0005)
    told = json.loads(json.dumps(made.as_dict()))
    assert (told["batch"], told["heads"], told["queries"], told["dim"], told["tokens"]) == (2, 4, 512, 128, 1024)
    assert told["matmul_tflops"] == 1000
    ours = told["figures"][0]
    assert ours["pass"] == "forward"
    assert (ours["seconds"], ours["graph_seconds"], ours["over_standard"]) == (0.001, 0.0005, 4.0)
    assert (ours["best_other"], ours["peak_bytes"]) == ("standard", 3 * 2**20)
