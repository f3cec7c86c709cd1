"""FP8 on a Hopper GPU: the kernel against FP64 on the same quantised numbers, and quantisation against the CPU's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from assay import flash_attention
from assay.flash.fp8 import BLOCK, FORMATS, FP8, _quantize_plainly, by_rows, centres, quantize, quantize_values
from tests.flash.fp8_inputs import check_that_a_row_stays_alone, draw, outlier_errors, rmse, values_of
from tests.flash.reference import LINE, reference_attention

launch = pytest.importorskip("assay.flash.fp8_launch")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

SHAPES: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "full": ((128, 128), (2, 2), (1024, 1024), {}),
    "causal": ((128, 128), (4, 2), (1000, 1000), {"causal": True}),
    "ragged": ((128, 128), (2, 2), (300, 515), {}),
    "more queries": ((128, 128), (2, 1), (400, 130), {"causal": True}),
    "window": ((128, 128), (2, 2), (400, 900), {"window": (165, 140)}),
    "softcap": ((128, 128), (2, 2), (513, 513), {"softcap": 2.0, "causal": True}),
    "one query": ((128, 128), (16, 16), (1, 3000), {}),
    "D 64": ((64, 64), (2, 2), (777, 777), {"causal": True}),
    "D 256": ((256, 256), (2, 2), (777, 777), {"causal": True}),
    "dims": ((80, 100), (2, 2), (500, 300), {}),
    "small values": ((128, 20), (2, 2), (300, 300), {}),
}


def with_p_in_e4m3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """FP64 but for P, which is cast to E4M3: as many times as there are keys, through the reference's V."""
    keys = torch.eye(k.shape[2], dtype=torch.float64, device=q.device).expand(*k.shape[:2], -1, -1)
    p, _ = reference_attention(q, k, keys, **options)
    top = p.amax(-1, keepdim=True).clamp(min=1e-300)
    p = (p / top * 256).to(torch.float8_e4m3fn).double() / 256 * top
    return p @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)


def line_over_cast() -> float:
    """Root mean square of what is wrong with P, by a line cut to eighths and by a cast to E4M3; over an octave."""
    x = np.exp2(np.arange(4096) / 4096)
    cast = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / x
    line = (1 + np.floor(8 * np.log2(x) + 1 / 32) / 8) / x
    return float(line.std() / line.mean() / cast.std())


@pytest.mark.parametrize("fp8", [FP8(), FP8(two_level=False),
                                 FP8(format="e5m2", scaling="tensor", rotate=False, two_level=True)],
                         ids=FP8.encoded)  # fmt: skip
@pytest.mark.parametrize("name", SHAPES)
def test_kernel_errs_by_the_cast_of_p(name: str, fp8: FP8) -> None:
    """Against FP64 on the same quantised numbers: as far off as a line is that stands for the exponential.

    A tenth is for rows of few keys, of which the largest is not exact, and the tensor cores' sums of 14 bits. The LSE
    is off by what P is at most.
    """
    (dim, value_dim), (heads, kv_heads), (queries, keys), options = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = (heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim)
    q, k, v = (torch.randn(2, *shape, device="cuda", generator=generator).bfloat16() for shape in shapes)
    v *= torch.exp2(torch.arange(keys, device="cuda") // BLOCK % 5).bfloat16()[:, None]
    out, lse = flash_attention(q, k, v, fp8=fp8, return_lse=True, **options)
    assert torch.equal(out, flash_attention(q, k, v, fp8=fp8, **options))
    rounded = [quantize(x, fp8, rotate=fp8.rotate, short=True).dequantized().double() for x in (q, k)]
    rounded.append(values_of(v, fp8))
    options = {"scale": dim**-0.5} | options
    truth, truth_lse = reference_attention(*rounded, **options)
    budget = rmse(with_p_in_e4m3(*rounded, **options).bfloat16(), truth)
    assert rmse(out, truth) <= 1.1 * line_over_cast() * budget
    seen = truth_lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    torch.testing.assert_close(lse.double()[seen], truth_lse[seen], rtol=2**-10, atol=-math.log(LINE[0]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_beyond_fp16(dim: int, causal: bool) -> None:
    """Up to 700 times the sum of as many ±1 as there are dimensions, so that P is 1, or a share of equals.

    The first keys are 2⁻²⁰ as large: to the large ones' scores theirs are as 0.
    """
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (torch.randn(2, 2, 600, dim, device="cuda", generator=generator).bfloat16() for _ in "qkv")
    q.sign_()
    k.sign_()
    q[:, :, 300:310] = k[:, :, 300:310]
    k[:, :, :BLOCK] *= 2.0**-20
    plain = FP8(rotate=False)
    how: dict[str, Any] = {"scale": 700.0 * 64 / dim, "causal": causal}
    out, lse = flash_attention(q, k, v, fp8=plain, return_lse=True, **how)
    rounded = values_of(v, plain)
    truth, truth_lse = reference_attention(q.double(), k.double(), rounded, **how)
    spread = reference_attention(q.double(), k.double(), rounded.abs(), **how)[0]
    _, centre = quantize_values(v, plain)
    off = torch.zeros_like(rounded) if centre is None else by_rows(centre, 600)[..., :dim].double()
    rest = reference_attention(q.double(), k.double(), (rounded - off).abs(), **how)[0]
    in_fp32 = 2**-22 * off.abs().amax(2, keepdim=True)  # what is left of V, times P, and the sum
    in_tensor_cores = 600 // 32 * 2**-14 * rest  # a step of 32 keys is cut to 14 bits
    wrong = (out.double() - truth).abs() - 2**-8 * truth.abs() - (LINE[1] / LINE[0] - 1) * spread
    wrong -= in_fp32 + in_tensor_cores
    assert wrong.max() <= 2.0**-200  # what e^-350 times a value is, where the value at P = 1 is 0
    torch.testing.assert_close(lse.double(), truth_lse, rtol=2**-20, atol=-math.log(LINE[0]) + 0.01)


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sinks_and_groups_of_values_far_from_0(dim: int, two_level: bool) -> None:
    """Every head of V has a mean of its own; a sink takes its share of that, and one of −inf nothing."""
    generator = torch.Generator("cuda").manual_seed(5)
    q, k, v = (torch.randn(2, heads, 200, dim, device="cuda", generator=generator) / 4 for heads in (6, 2, 2))
    v += 3 * torch.randn(2, 2, 1, dim, device="cuda", generator=generator)
    q, k, v = (x.bfloat16() for x in (q, k, v[:, :, :150]))
    k = k[:, :, :150]
    sinks = torch.tensor([-math.inf, -3.0, 0.0, 0.5, 2.0, -math.inf], device="cuda")
    fp8 = FP8(two_level=two_level)
    out = flash_attention(q, k, v, causal=True, sinks=sinks, fp8=fp8)  # the first 50 rows see no key
    eight_q, eight_k = (quantize(x, fp8, rotate=True, short=True).dequantized().double() for x in (q, k))
    values = values_of(v, fp8)
    how: dict[str, Any] = {"scale": dim**-0.5, "causal": True, "sinks": sinks.double()}
    truth = reference_attention(eight_q, eight_k, values, **how)[0]
    spread = reference_attention(eight_q, eight_k, values.abs() + 2 * centres(v)[:, :, None, :dim].abs(), **how)[0]
    most = float(eight_q.norm(dim=3).max() * eight_k.norm(dim=3).max()) * dim**-0.5
    score = (dim / 32 + 5) * 2.0**-11 * most  # of sums of 32 products in FP16, the slope, and a difference of two
    assert (out[:, ::5, :50] == 0).all()
    wrong = (out.double() - truth).abs() - 2**-8 * truth.abs()
    assert (wrong <= (LINE[1] / LINE[0] * math.exp(2 * score) - 1) * spread + 1e-6).all()


@pytest.mark.parametrize("scaling", ["tensor", "head", "block"])
@pytest.mark.parametrize(("rotate", "dim"), [(False, 128), (True, 64), (True, 100), (True, 128), (True, 256)])
@pytest.mark.parametrize("odd", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("form", FORMATS)
def test_quantised_on_the_gpu(form: str, odd: float | None, rotate: bool, dim: int, scaling: str) -> None:
    """The same bits as on the CPU, but where the rotation's sums round to the other side of a step."""
    x, fp8 = draw(2, 3, 300, dim, dtype=torch.bfloat16), FP8(format=form, scaling=scaling)
    if odd is not None:
        x[1, 2, 200, 7] = odd
    here, there = (quantize(each, fp8, rotate=rotate, short=rotate) for each in (x, x.cuda()))
    assert torch.equal(here.scales, there.scales.cpu())
    ours, theirs = here.values.float(), there.values.cpu().float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert (ours.nan_to_num(0.0) != theirs.nan_to_num(0.0)).double().mean() <= (1e-3 if rotate else 0)


@pytest.mark.parametrize("dim", [64, 100, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_quantised_on_the_gpu(dtype: torch.dtype, dim: int) -> None:
    v, fp8 = (draw(2, 3, 700, dim) + 3.0).to(dtype), FP8()
    off = centres(v.cuda())
    step = v.float().abs().amax(2) * 2.0**-7
    assert ((off.cpu() - centres(v))[..., :dim].abs() <= step).all()
    here, there = _quantize_plainly(v, off.cpu(), fp8, False, False), launch.quantize(v.cuda(), off, fp8, False, False)
    assert torch.equal(here.scales, there.scales.cpu())
    assert torch.equal(here.values.view(torch.uint8), there.values.cpu().view(torch.uint8))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_row_of_q_that_is_not_finite_on_the_gpu(dim: int) -> None:
    q, k, v = (draw(1, 2, 300, dim, seed=seed, dtype=torch.bfloat16).cuda() for seed in range(3))
    check_that_a_row_stays_alone(q, k, v)


def test_outliers_on_the_gpu() -> None:
    errors = outlier_errors("cuda")
    assert errors["rotate True"] <= 9.1e-3
    assert errors["rotate True"] < 0.7 * errors["rotate False"]


def test_two_levels_lose_less() -> None:
    """Sums of one sign, which the tensor cores cut short: in FP32 they are not."""
    generator = torch.Generator("cuda").manual_seed(2)
    q, k = (torch.randn(1, 1, 8192, 128, device="cuda", generator=generator).bfloat16() for _ in range(2))
    half = 1.0 - 2.0 * (torch.arange(8192, device="cuda") >= 4096)  # the mean is 0
    v = half.bfloat16()[:, None].expand_as(q)
    truth, _ = reference_attention(q.double(), k.double(), v.double(), scale=128**-0.5, causal=True)
    short, whole = (rmse(flash_attention(q, k, v, causal=True, fp8=replace(FP8(), two_level=x)), truth)
                    for x in (False, True))  # fmt: skip
    assert whole < short


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_one_level_loses_nothing_where_the_mean_stays(mean: float) -> None:
    generator = torch.Generator("cuda").manual_seed(4)
    q, k, v = (torch.randn(1, 1, 8192, 128, device="cuda", generator=generator).bfloat16() for _ in "qkv")
    v = v * 0.1 + mean
    truth, _ = reference_attention(q.double(), k.double(), v.double(), scale=128**-0.5)
    one, two = (rmse(flash_attention(q, k, v, fp8=FP8(two_level=x)), truth) for x in (False, True))
    assert one <= 1.05 * two
