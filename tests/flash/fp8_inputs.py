"""Inputs of FP8's tests, and what they look for on the CPU and on a GPU."""

from __future__ import annotations

import math

import torch

from assay import flash_attention, golden_attention
from assay.cases.attention.inputs import DISTRIBUTIONS
from assay.flash.fp8 import BLOCK, FP8, by_rows, quantize_values


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Blocks of many sizes, and one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-9, 9, (*shape[:2], shape[2] // BLOCK + 1, 1, 1), generator=generator)
    sizes = torch.exp2(sizes.float()).expand(-1, -1, -1, BLOCK, 1).flatten(2, 3)[:, :, : shape[2]]
    x = torch.randn(shape, generator=generator) * sizes
    x[0, 0, :BLOCK] = 0
    return x.to(dtype)


def values_of(v: torch.Tensor, fp8: FP8) -> torch.Tensor:
    """V as it is multiplied: with sums of one level what is left without the centres in 8 bits, and those."""
    eight, off = quantize_values(v, fp8)
    whole = eight.dequantized().double()
    return (whole if off is None else whole + by_rows(off, v.shape[2]).double())[..., : v.shape[3]]


def rmse(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x.double() - truth).square().mean().sqrt())


def outlier_errors(device: str, length: int = 1024, seeds: int = 2) -> dict[str, float]:
    """RMSE against FP64 on FA3's inputs, D 128: FP8 as here, rotated or not, and plain attention in per-tensor FP8."""
    squares: dict[str, float] = {}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (x.to(device) for x in DISTRIBUTIONS["outliers"].draw((1, 2, length, 128), generator))
        truth = golden_attention(q, k, v)
        given = [x.bfloat16() for x in (q, k, v)]
        results = {f"rotate {x}": flash_attention(*given, fp8=FP8(rotate=x)) for x in (True, False)}
        units = [x.double().abs().amax() / 448 for x in given]
        eight = [(x.double() / unit).to(torch.float8_e4m3fn).double() * unit
                 for x, unit in zip(given, units, strict=True)]  # fmt: skip
        p = torch.softmax(eight[0] @ eight[1].mT * 128**-0.5, -1).to(torch.float8_e4m3fn).double()
        results["plain"] = p @ eight[2]
        for name, out in results.items():
            squares[name] = squares.get(name, 0.0) + rmse(out, truth) ** 2 / seeds
    return {name: math.sqrt(square) for name, square in squares.items()}


def check_that_a_row_stays_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One of q that is not finite is NaN, and all others have the bits that they have without it."""
    q[0, 1, 150] = 0
    plain = flash_attention(q, k, v, causal=True, fp8=True)
    q[0, 1, 150, 3] = torch.inf
    out = flash_attention(q, k, v, causal=True, fp8=True)
    assert out[0, 1, 150].isnan().all()
    out[0, 1, 150] = plain[0, 1, 150]
    assert torch.equal(out, plain)
