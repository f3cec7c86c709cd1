"""What a record says is what the functions of the library say."""

from __future__ import annotations

import math

import pytest
import torch

from assay import Plan, baseline_attention, deviation, golden_attention, round_to, tiled_attention, wasserstein
from assay.cases.attention.golden import golden_gradients
from assay.cases.attention.inputs import draw_inputs
from assay.results.record import COLUMNS, from_json, to_json
from assay.sweeps.grid import SWEEPS, default_sweep
from assay.sweeps.measure import Bench

SMALL = {"length": 96, "dim": 16, "sram": 640, "seeds": 1}
GRIDS: dict[str, dict[str, object]] = {
    "length": {"lengths": (64,), "dim": 16, "sram": 640, "seeds": 1},
    "blocks": {"srams": (640,), "length": 96, "dim": 16, "seeds": 1},
    "kernels": {"length": 96, "dim": 16, "seeds": 1},
}


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_makes_whole_records_whose_null_is_zero(name: str) -> None:
    points = default_sweep(name, **GRIDS.get(name, SMALL)).points("cpu")[:40]
    bench = Bench(points[0], "cpu")
    for point in points:
        if point.group == points[0].group:
            record = bench.measure(point)
            assert set(record) == set(COLUMNS)
            assert from_json(to_json(record))["id"] == point.id("CPU")
            assert record["null_max"] == 0.0


def test_a_record_has_the_figures_of_the_library() -> None:
    point = default_sweep("precision", **SMALL, formats=("bf16",), inputs=("outliers",), plans=("uniform",)).points(
        "cpu"
    )[0]
    record = Bench(point, "cpu").measure(point)
    drawn = draw_inputs("outliers", (1, 2, 96, 16), 0)
    q, k, v = (round_to(x, "bf16").bfloat16() for x in drawn[:3])
    golden = golden_attention(q, k, v)
    flash = tiled_attention(q, k, v, plan=Plan.uniform("bf16"), order="fa1", block=(10, 10))
    plain = baseline_attention(q, k, v, plan=Plan.eager("bf16"))
    for name, a, b in (("error", flash, golden), ("baseline_error", plain, golden), ("difference", flash, plain)):
        expected = deviation(a, b, "bf16")
        for figure in ("max", "mean", "std", "rmse", "relative", "bias", "ulp_max", "ulp_mean", "cosine", "sqnr"):
            assert record[f"{name}_{figure}"] == getattr(expected, figure)
        assert record[f"{name}_q999"] == expected.quantiles[0.999]
        assert record[f"{name}_w1"] == wasserstein(a.double(), b.double())
    assert record["inputs_error_max"] == deviation(golden, golden_attention(*drawn[:3])).max
    assert record["golden_rms"] == pytest.approx(float(golden.square().mean().sqrt()))


def test_gradients_of_a_real_kernel() -> None:
    points = default_sweep("kernels", **GRIDS["kernels"], formats=("bf16",)).points("cpu")
    point = next(p for p in points if p.tensor == "dk" and p.causal and "flash" in p.variant)
    record = Bench(point, "cpu").measure(point)
    q, k, v, grad = (round_to(x, "bf16").bfloat16() for x in draw_inputs("normal", (1, 2, 96, 16), 0))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    theirs = torch.autograd.grad(out, leaves, grad)[1]
    assert record["error_max"] == deviation(theirs, golden_gradients(q, k, v, grad, causal=True)[1]).max


def test_an_overflow_is_recorded_as_one() -> None:
    """fp8_e4m3 has no infinity and ends at 448: the sums of rows of 1024 like scores become NaN."""
    point = default_sweep("precision", formats=("fp8_e4m3",), inputs=("uniform",), seeds=1).points("cpu")[0]
    record = from_json(to_json(Bench(point, "cpu").measure(point)))
    assert record["null_max"] == 0.0
    assert record["error_max"] == math.inf
    assert record["error_nonfinite"] > 0.9 * 2 * 1024 * 64
