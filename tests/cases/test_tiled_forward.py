from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from assay import Plan, baseline_attention, deviation, formats, golden_attention, round_to, tiled_attention
from assay.cases.attention import arithmetic, problem
from assay.cases.attention.arithmetic import carrier_dtype
from tests.cases import literal
from tests.cases.inputs import qkv

NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def assert_same_up_to_sums(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for the order of FP32 sums inside a matrix product.

    That order moves a sum by about 1e-7 of its size, and so one rounding in a few thousand to a 16-bit format; one
    moved score touches its whole row, so up to a tenth of the rows of ~100 scores may differ, by an ULP or two.
    """
    assert actual.dtype == expected.dtype
    eps = torch.finfo(actual.dtype).eps
    if eps > 1e-6:
        assert (actual != expected).any(-1).double().mean().item() <= 0.1
    torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=4 * eps * expected.abs().max().item())


@pytest.mark.parametrize("fmt", NATIVE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((96, 96), (32, 32)), ((70, 83), (16, 25)), ((83, 70), (50, 7))])
def test_equals_the_literal_double_loop(fmt: str, causal: bool, shape: tuple[int, int], block: tuple[int, int]) -> None:
    q, k, v = (x.to(NATIVE[fmt]) for x in qkv(*shape, dim=32))
    kwargs: dict[str, Any] = {"plan": Plan.uniform(fmt), "block": block, "causal": causal}
    ours = tiled_attention(q, k, v, order="fa1", **kwargs)[0, 0]
    assert_same_up_to_sums(ours, literal.fa1(q[0, 0], k[0, 0], v[0, 0], block, causal))
    ours = tiled_attention(q, k, v, order="fa2", **kwargs)[0, 0]
    assert_same_up_to_sums(ours, literal.fa2(q[0, 0], k[0, 0], v[0, 0], block, causal)[0])


def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(130, 150, heads=6, kv_heads=2, dim=16)
    for order in ("fa1", "fa2", "split_kv"):
        for causal in (False, True):
            kwargs: dict[str, Any] = {"plan": Plan.uniform("bf16"), "order": order, "block": (16, 32), "causal": causal}
            whole = tiled_attention(q, k, v, **kwargs)
            with monkeypatch.context() as patch:
                patch.setattr("assay.cases.attention.problem._ROWS_AT_ONCE", 32)
                patch.setitem(problem._TILE_ELEMENTS, "cpu", 600)
                pieces = tiled_attention(q, k, v, **kwargs)
            assert torch.equal(whole, pieces)


@pytest.mark.parametrize("order", ["fa1", "fa2"])
@pytest.mark.parametrize("pieces", [False, True])
def test_reversed_keys_are_reversed_blocks(order: Any, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the blocks backwards is the same as laying them out backwards; the last one may be short."""
    q, k, v = qkv(40, 96, heads=2, dim=16)
    if pieces:
        monkeypatch.setitem(problem._TILE_ELEMENTS, "cpu", 600)
    how: dict[str, Any] = {"plan": Plan.uniform("bf16"), "order": order, "block": (8, 16)}
    flipped = [x.unflatten(2, (6, 16)).flip(2).flatten(2, 3) for x in (k, v)]
    backwards = tiled_attention(q, k, v, reverse_keys=True, **how)
    assert torch.equal(backwards, tiled_attention(q, *flipped, **how))
    assert not torch.equal(backwards, tiled_attention(q, k, v, **how))
    short = tiled_attention(
        q.double(), k.double()[:, :, :90], v.double()[:, :, :90], plan=Plan.fp64(), reverse_keys=True
    )
    golden = golden_attention(q, k[:, :, :90], v[:, :, :90])
    torch.testing.assert_close(short, golden, rtol=0, atol=1e-14)


@pytest.mark.parametrize("order", ["fa1", "fa2", "split_kv"])
@pytest.mark.parametrize("exp2", [False, True])
@pytest.mark.parametrize("masks", ["none", "causal", "window", "bias", "bool", "alibi"])
def test_fp64_plan_is_golden(order: Any, exp2: bool, masks: str) -> None:
    """In FP64 every order and trick is the same function: what is left is FP64's own rounding."""
    q, k, v = (x.double() for x in qkv(45, 61, batch=2, heads=4, kv_heads=2, dim=24, value_dim=20))
    generator = torch.Generator().manual_seed(1)
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"causal": True},
        "window": {"window": (7, 3)},
        "bias": {"bias": torch.randn(2, 1, 45, 61, generator=generator)},
        "bool": {"bias": torch.rand(4, 45, 61, generator=generator) > 0.5},
        "alibi": {"alibi_slopes": torch.rand(4, generator=generator), "causal": True},
    }
    mask = kinds[masks]
    golden = golden_attention(q, k, v, **mask)
    ours = tiled_attention(q, k, v, plan=Plan.fp64(), order=order, exp2=exp2, block=(16, 10), splits=3, **mask)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, golden, rtol=0, atol=2e-15 * 8)


@pytest.mark.parametrize(
    "tricks",
    [
        {"lazy_threshold": 5.0},
        {"tie_shift": 4.0},
        {"sum_after_cast": True},
        {"probability_shift": 8},
        {"lazy_threshold": 8.0, "exp2": True, "probability_shift": 3, "causal": True},
    ],
)
def test_tricks_do_not_change_the_function(tricks: dict[str, Any]) -> None:
    q, k, v = (x.double() for x in qkv(40, 64, dim=16))
    k[:, :, 5] = k[:, :, 9]  # tied scores in one block
    golden = golden_attention(q, k, v, causal=bool(tricks.get("causal")))
    ours = tiled_attention(q, k, v, plan=Plan.fp64(), block=(16, 16), **tricks)
    torch.testing.assert_close(ours, golden, rtol=0, atol=1e-14)


def test_lazy_rescaling_keeps_a_stale_maximum() -> None:
    """Scores that climb by less than the threshold: P outgrows 1, which a narrow format then shows."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 1, 4, 1)
    v = torch.ones(1, 1, 4, 1)
    narrow = Plan.shipped("fp32").replace(probabilities="fp4_e2m1", saturate=True)
    # P is exp(0), exp(1), exp(2), exp(3) against the stale maximum 0: 1, 2.7, 7.4, 20 → 1, 3, 6, 6 in FP4.
    ours = tiled_attention(q, k, v, plan=narrow, block=(1, 1), scale=1.0, lazy_threshold=10.0, sum_after_cast=True)
    exact = tiled_attention(q, k, v, plan=narrow, block=(1, 1), scale=1.0, lazy_threshold=10.0)
    assert ours.item() == 1.0
    assert exact.item() == pytest.approx(16 / torch.tensor([0.0, 1, 2, 3]).exp().sum().item(), rel=1e-6)


def test_sum_after_cast_removes_the_bias_that_v_of_ones_shows() -> None:
    q, k, _ = (round_to(x, "bf16") for x in qkv(512, 512, dim=64))
    v = torch.ones_like(k)
    plan = Plan.shipped("bf16").replace(output="fp32")
    before = tiled_attention(q, k, v, plan=plan)
    after = tiled_attention(q, k, v, plan=plan, sum_after_cast=True)
    assert deviation(after, torch.ones_like(after)).max <= 3 * torch.finfo(torch.float32).eps
    assert deviation(before, torch.ones_like(before)).max > 1e-4


def test_tie_shift_keeps_every_p_below_one() -> None:
    """Rows with a repeated positive maximum: unshifted, P is exactly 1 twice; shifted, P·V loses no such 1."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([2.0, 2.0, 1.0, 0.0]).view(1, 1, 4, 1)
    v = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 4, 1)
    plan = Plan.shipped("fp32").replace(probabilities="fp4_e2m1")
    plain = tiled_attention(q, k, v, plan=plan, scale=1.0, block=(4, 4))
    shifted = tiled_attention(q, k, v, plan=plan, scale=1.0, block=(4, 4), tie_shift=1.25)
    total = torch.tensor([2.0, 2, 1, 0]).exp().sum().item()
    assert plain.item() == pytest.approx(1.0 / (total / torch.tensor(2.0).exp().item()), rel=1e-6)
    # exp(2 − 2.5) = 0.607 rounds to 0.5; the row sum is exp(−2.5) times the exponentials' sum.
    assert shifted.item() == pytest.approx(0.5 / (total * torch.tensor(-2.5).exp().item()), rel=1e-6)


def test_larger_blocks_deviate_less_in_bf16() -> None:
    """The paper's Figure 6c, on uniform inputs: fewer rescalings, less deviation."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (round_to(torch.rand(1, 2, 1024, 64, generator=generator), "bf16") for _ in range(3))
    golden = golden_attention(q, k, v)
    errors = [
        deviation(tiled_attention(q, k, v, plan=Plan.uniform("bf16"), order="fa1", block=(b, b)), golden).rmse
        for b in (16, 64, 256)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_shipped_plan_beats_plain_bf16_attention() -> None:
    q, k, v = (round_to(x, "bf16") for x in qkv(256, 256, heads=2, dim=64))
    golden = golden_attention(q, k, v)
    plain = deviation(baseline_attention(q, k, v, plan=Plan.uniform("bf16")), golden).rmse
    flash = deviation(tiled_attention(q, k, v, plan=Plan.shipped("bf16")), golden).rmse
    assert flash < plain


def test_short_accumulator_and_its_promotion() -> None:
    """Constant products make the sums countable: E8M3 keeps 4 bits, so 32 + 1 is lost without promotion."""
    q = torch.ones(1, 1, 1, 64)
    k = torch.ones(1, 1, 1, 64)
    plan = Plan.shipped("fp32").replace(accumulator="e8m3", accumulator_width=1, accumulator_truncates=True)

    def score(plan: Plan) -> float:
        """The log-sum-exp of one key is its score; read it back through a second key of score 0."""
        keys = torch.cat((k, torch.zeros_like(k)), dim=2)
        values = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
        share = tiled_attention(q, keys, values, plan=plan, scale=1 / 16).item()
        return 16 * torch.logit(torch.tensor(share, dtype=torch.float64)).item()

    assert score(plan) == pytest.approx(16.0, rel=1e-4)  # 1 + 1 + … stops at 16 = 2^4: 17 has 5 bits
    assert score(plan.replace(promotion=8)) == pytest.approx(64.0, rel=1e-3)


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "fp8_e4m3", "fp4_e2m1", "e8m12", "fp64"])
def test_null_is_exactly_zero(fmt: str) -> None:
    q, k, v = qkv(65, 65, heads=2, dim=16)
    plan = Plan.uniform(fmt).replace(saturate=True)
    a, b = (tiled_attention(q, k, v, plan=plan, order="fa1", block=(16, 16)) for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "fp8_e5m2", "fp8_e4m3", "fp6_e3m2"])
def test_output_lies_on_the_grid(fmt: str) -> None:
    q, k, v = qkv(33, 47, dim=16)
    out = tiled_attention(q, k, v, plan=Plan.uniform(fmt).replace(saturate=True))
    assert torch.isfinite(out).all()
    assert torch.equal(out, round_to(out, fmt))


def test_result_dtype_never_loses_a_bit() -> None:
    q, k, v = qkv(16, 16, dim=8)
    assert tiled_attention(q, k, v, plan=Plan.uniform("bf16")).dtype == torch.float32
    assert tiled_attention(q, k, v, plan=Plan.fp64()).dtype == torch.float64
    half = [x.bfloat16() for x in (q, k, v)]
    assert tiled_attention(*half, plan=Plan.shipped("bf16")).dtype == torch.bfloat16
    assert tiled_attention(*half, plan=Plan.shipped("fp16")).dtype == torch.float32
    assert tiled_attention(*half, plan=Plan.uniform("fp32")).dtype == torch.float32


def test_carrier_is_wide_enough() -> None:
    assert carrier_dtype(Plan.uniform("fp16")) == torch.float32
    assert carrier_dtype(Plan.uniform("tf32")) == torch.float32
    assert carrier_dtype(Plan.uniform("e8m11")) == torch.float64  # 2·12 + 2 > 24 bits: FP32 could round twice
    assert carrier_dtype(Plan.uniform("e9m3")) == torch.float64
    assert carrier_dtype(Plan.shipped("bf16").replace(accumulator="e8m13")) == torch.float32


def test_global_matmul_precision_is_left_alone() -> None:
    q, k, v = qkv(64, 64, dim=64)
    plain = tiled_attention(q, k, v, plan=Plan.uniform("fp32"))
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(tiled_attention(q, k, v, plan=Plan.uniform("fp32")), plain)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_matmul_precision_of_the_newer_api_is_left_alone() -> None:
    """In a process of its own: torch refuses to mix its two ways of setting it."""
    program = """
import torch
from assay import Plan, deviation, golden_attention, tiled_attention
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
q = torch.randn(1, 1, 64, 64)
out = tiled_attention(q, q, q, plan=Plan.uniform("fp32"))
assert deviation(out, golden_attention(q, q, q)).relative < 1e-5
assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_native_bf16_products_agree_with_fp32_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(128, 128, heads=2, dim=64)
    native = tiled_attention(q, k, v, plan=Plan.uniform("bf16"))
    monkeypatch.setattr(arithmetic, "_has_bf16_matmul", lambda device: False)
    assert_same_up_to_sums(tiled_attention(q, k, v, plan=Plan.uniform("bf16")).bfloat16(), native.bfloat16())


@pytest.mark.slow
def test_memory_grows_with_n_not_n_squared() -> None:
    """32k queries and keys in a process of its own: the scores would take 4 GB in FP32, the working set does not."""
    program = """
import resource, torch
from assay import Plan, tiled_attention
tiled_attention(*(torch.randn(1, 1, 1024, 16) for _ in range(3)), plan=Plan.uniform("bf16"))
q, k, v = (torch.randn(1, 1, 32768, 16) for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tiled_attention(q, k, v, plan=Plan.uniform("bf16"), block=(128, 128))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 0.02 * 32768 * 32768 * 4


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_autocast_changes_nothing(fmt: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(64, 64, dim=32))
    plan = Plan.uniform(fmt)
    for attention in (tiled_attention, baseline_attention):
        plain = attention(q, k, v, plan=plan)
        plain_grads = torch.autograd.grad(plain.sum(), (q, k, v))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = attention(q, k, v, plan=plan)
            grads = torch.autograd.grad(cast.sum(), (q, k, v))
        assert torch.equal(plain, cast)
        assert all(torch.equal(a, b) for a, b in zip(plain_grads, grads, strict=True))


def test_wide_accumulator_is_not_ignored() -> None:
    """2^13·2^12 + 1 − 2^25 is 0 in FP32 and 1 in FP64."""
    q = torch.tensor([2.0**13, 1.0, -(2.0**13)]).view(1, 1, 1, 3)
    k = torch.tensor([[2.0**12, 1.0, 2.0**12], [0.0, 0.0, 0.0]]).view(1, 1, 2, 3)
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    wide = Plan.uniform("bf16").replace(accumulator="fp64")
    expected = round_to(golden_attention(q, k, v, scale=1.0), "bf16").item()
    for attention in (tiled_attention, baseline_attention):
        assert attention(q, k, v, plan=wide, scale=1.0).item() == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "tf32", "bf16"])
def test_fp64_inputs_are_rounded_once(fmt: str, saturate: bool) -> None:
    """Just above a tie, by less than FP32 sees."""
    half = formats.get(fmt).epsilon / 2
    v = torch.tensor([1 + half + 2.0**-40], dtype=torch.float64).view(1, 1, 1, 1)
    one = torch.ones_like(v)
    out = tiled_attention(one, one, v, plan=Plan.uniform(fmt).replace(saturate=saturate))
    assert out.item() == 1 + 2 * half


def test_ties_are_seen_under_a_narrow_maximum() -> None:
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([2.001, 2.001, 0.0, 0.0]).view(1, 1, 4, 1)
    v = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 4, 1)
    plan = Plan.shipped("fp32").replace(maximum="bf16", probabilities="fp4_e2m1")
    how: dict[str, Any] = {"plan": plan, "scale": 1.0, "block": (4, 4)}
    assert tiled_attention(q, k, v, **how) != tiled_attention(q, k, v, tie_shift=1.25, **how)


def test_the_most_negative_bias_is_no_infinity() -> None:
    """Masks of finfo.min are common: a row that has nothing else sees all keys alike, also when scores are in log₂."""
    q, k, v = qkv(4, 8, dim=8)
    bias = torch.full((4, 8), torch.finfo(torch.float32).min)
    golden = golden_attention(q, k, v, bias=bias)
    for exp2 in (False, True):
        out = tiled_attention(q, k, v, plan=Plan.uniform("fp32"), bias=bias, exp2=exp2)
        assert deviation(out, golden).max < 1e-6
    hidden = torch.full((4, 8), -torch.inf)
    assert (tiled_attention(q, k, v, plan=Plan.uniform("fp32"), bias=hidden, exp2=True) == 0).all()
