"""FP8 layers: the values are ml_dtypes' casts, the products numpy's in FP64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from assay.formats.catalog import FP8_E4M3, FP8_E5M2
from assay.formats.spec import Format
from assay.training import fp8
from assay.training.fp8 import fp8_linear, quantize

CASTS = {"fp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
FORMATS = pytest.mark.parametrize("format", [FP8_E4M3, FP8_E5M2], ids=str)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_hand(x: Tensor, name: str) -> tuple[np.ndarray, np.float32]:
    """FP8 values as FP64, and the scale."""
    cast, largest = CASTS[name]
    values = x.float().numpy()
    scale = np.abs(values).max() / np.float32(largest)
    return (values / scale).astype(cast).astype(np.float64), scale


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_values_and_scale(format: Format, dtype: torch.dtype, size: float) -> None:
    x = (draw(64, 33) * size).to(dtype)
    values, scale = quantize(x, format)
    expected, expected_scale = by_hand(x, str(format))
    assert scale.item() == expected_scale
    assert np.array_equal(values.double().numpy(), expected)
    assert values.double().abs().max() == CASTS[str(format)][1]
    assert values.element_size() == 1


@FORMATS
def test_zeros_and_tiny_values_have_a_scale(format: Format) -> None:
    values, scale = quantize(torch.zeros(4, 4), format)
    assert scale > 0
    assert not values.float().any()
    x = torch.tensor([[1e-44, -3e-42, 1e-38]])
    values, scale = quantize(x, format)
    assert torch.isfinite(values.float()).all()
    assert (values.float() * scale)[0, 2].item() == pytest.approx(1e-38, rel=0.13)


@FORMATS
def test_the_largest_values_there_are(format: Format) -> None:
    x = torch.full((2, 2), torch.finfo(torch.float32).max)
    values, scale = quantize(x, format)
    assert (values.double() * scale.double()).flatten().tolist() == pytest.approx([float(x[0, 0])] * 4, rel=1e-6)


@FORMATS
def test_what_is_not_finite_does_not_set_the_scale(format: Format) -> None:
    x = draw(5, 8).flatten()
    expected, scale = quantize(x, format)
    marks = torch.tensor([torch.nan, torch.inf, -torch.inf])
    values, marked_scale = quantize(torch.cat((x, marks)), format)
    assert marked_scale == scale
    assert torch.equal(values[:-3].float(), expected.float())
    assert torch.isnan(values[-3].float())
    assert not torch.isfinite(values[-2:].float()).any()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients_by_hand(dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = draw(2, 5, 48, seed=1).to(dtype), draw(24, 48, seed=2), draw(24, seed=3)
    grad = draw(2, 5, 24, seed=4).bfloat16()
    leaves = [t.clone().requires_grad_() for t in ((x, weight, bias) if with_bias else (x, weight))]
    out = fp8_linear(*leaves)
    out.backward(grad)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 5, 24))

    (a, sa), (b, sb) = by_hand(x, "fp8_e4m3"), by_hand(weight, "fp8_e4m3")
    g, sg = by_hand(grad, "fp8_e5m2")
    a, b, g = a * float(sa), b * float(sb), g * float(sg)
    added = bias.bfloat16().double().numpy() if with_bias else 0.0
    assert_near(out, a @ b.T + added, np.abs(a) @ np.abs(b).T + np.abs(added))
    assert_near(leaves[0].grad, g @ b, np.abs(g) @ np.abs(b), dtype)
    rows_g, rows_a = g.reshape(-1, 24), a.reshape(-1, 48)
    assert_near(leaves[1].grad, rows_g.T @ rows_a, np.abs(rows_g).T @ np.abs(rows_a), torch.float32)
    if with_bias:
        unrounded = grad.double().numpy().reshape(-1, 24)
        assert_near(leaves[2].grad, unrounded.sum(0), np.abs(unrounded).sum(0), torch.float32)


def assert_near(
    actual: Tensor | None, exact: np.ndarray, sizes: np.ndarray, dtype: torch.dtype = torch.bfloat16
) -> None:
    """FP32's error of a sum of 48 products and two scales, and the rounding of the result; nothing of FP8's 6%."""
    assert actual is not None
    assert actual.dtype == dtype
    bound = 50 * 2.0**-24 * sizes + np.abs(exact) * torch.finfo(dtype).eps
    assert (np.abs(actual.detach().double().numpy() - exact) <= bound).all()


def test_fp8_is_coarse_but_right() -> None:
    """Against FP32: each operand is off by 2⁻⁴ of itself at most (E5M2: 2⁻³), and evenly to both sides."""
    x, weight, grad = draw(64, 128, seed=1), draw(32, 128, seed=2), draw(64, 32, seed=3)
    found, exact = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    fp8_linear(*found).backward(grad.bfloat16())
    F.linear(*exact).backward(grad)
    for mine, other in zip(found, exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert 0.01 < float((mine.grad - other.grad).norm() / other.grad.norm()) < 0.12


def test_only_the_gradients_that_are_needed() -> None:
    x, weight = draw(3, 16), draw(4, 16).requires_grad_()
    fp8_linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_no_second_derivative_in_silence() -> None:
    x, weight = draw(3, 16).requires_grad_(), draw(4, 16)
    (first,) = torch.autograd.grad(fp8_linear(x, weight).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_nan_comes_through_in_its_row_alone() -> None:
    x = draw(3, 16)
    x[1, 4] = torch.inf
    out = fp8_linear(x, draw(4, 16))
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[[0, 2]]).all()


def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Let the CPU's `torch._scaled_mm`, torch's own emulation, stand in for the GPU's; its calls."""
    calls: list[tuple[object, ...]] = []
    real = torch._scaled_mm

    def spy(a: Tensor, b: Tensor, **options: object) -> Tensor:
        calls.append((tuple(a.shape), tuple(b.shape), a.stride(1), b.stride(0), options["out_dtype"]))
        return real(a, b, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    monkeypatch.setattr(fp8, "_has_kernel", lambda device: True)
    return calls


def test_the_kernel_is_called_by_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first matrix by rows, the second by columns, and the same result as the emulation's."""
    x, weight, bias = draw(2, 16, 64, seed=1), draw(32, 64, seed=2), draw(32, seed=3)
    results = []
    for with_kernel in (False, True):
        calls = kernel(monkeypatch) if with_kernel else []
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = fp8_linear(*leaves)
        out.float().square().sum().backward()
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    assert calls == [
        ((32, 64), (64, 32), 1, 1, torch.bfloat16),
        ((32, 32), (32, 64), 1, 1, torch.float32),
        ((32, 32), (32, 64), 1, 1, torch.float32),
    ]
    for emulated, called in zip(*results, strict=True):
        assert emulated is not None
        assert called is not None
        torch.testing.assert_close(called, emulated, rtol=1e-2, atol=1e-2 * float(emulated.abs().max()))


@pytest.mark.parametrize(("rows", "inside", "out", "called"), [(7, 32, 16, 2), (16, 30, 16, 0), (16, 32, 12, 1)])
def test_shapes_that_the_kernel_refuses_are_emulated(
    monkeypatch: pytest.MonkeyPatch, rows: int, inside: int, out: int, called: int
) -> None:
    """A product needs 16 columns (and multiples) on both sides of its second matrix: 7 rows fail the weight's alone."""
    calls = kernel(monkeypatch)
    weight = draw(out, inside).requires_grad_()
    fp8_linear(draw(rows, inside).requires_grad_(), weight).sum().backward()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
    assert len(calls) == called


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rows", [64, 50])
def test_on_cuda_as_on_the_cpu(rows: int) -> None:
    x, weight, bias = draw(rows, 128, seed=1), draw(64, 128, seed=2), draw(64, seed=3)
    grad = draw(rows, 64, seed=4).bfloat16()
    results: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        leaves = [t.detach().to(device).requires_grad_() for t in (x, weight, bias)]
        out = fp8_linear(*leaves)
        out.backward(grad.to(device))
        results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)])
    for ours, device_s in zip(*results, strict=True):
        # The tensor cores add up FP8 products in some 14 bits; one more rounding to bf16 may flip.
        torch.testing.assert_close(device_s, ours, rtol=2.0**-7, atol=2.0**-10 * float(ours.abs().max()))
