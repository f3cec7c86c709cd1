"""Ways to make P in E4M3 without a GPU: how much each adds to the error of attention in 8 bits.

- cast: exponentials in FP32, rounded to E4M3, summed up before that (as most kernels do; ours did);
- placed: P cut from the bits of its logarithm, of scores in FP16, relative to what FP16 holds near the maximum, chosen
  such that the line that stands for the exponential is right there (the kernel in use);
- above: the same, relative to what FP16 holds above the maximum;
- top: the same, relative to the maximum itself, which is taken from the scores first.

RMSE against FP64 attention of bf16 inputs, over that of "cast"; "exact": P that is not rounded. Q and K rotated, scales
of 128 rows, N 2048, D 128, 2 heads. Scores in FP16 are rounded after every 32 products. Ten seconds on two cores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from assay.cases.attention.inputs import DISTRIBUTIONS
from assay.flash.fp8 import BLOCK, quantize, rotation

LENGTH, DIM, LONGEST = 2048, 128, 160.0
UNIT = DIM**-0.5 / math.log(2)
ONE_OF_P = 1024 + 8 * (8 + 7)  # its bits at 2⁸, in the last ones of an FP16 number
CUT = 15 / 32


def short(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated and in E4M3, with scales that are powers of two and make no row longer than LONGEST."""
    turned = x @ rotation(DIM)
    most = turned.unflatten(2, (-1, BLOCK)).norm(dim=4).amax(3) / LONGEST
    scales = torch.exp2(most.log2().ceil()).repeat_interleave(BLOCK, 2)[..., None]
    return (turned / scales).to(torch.float8_e4m3fn).float(), scales


def scores_in_fp16(q: Tensor, k: Tensor) -> Tensor:
    total = torch.zeros(*q.shape[:3], k.shape[2])
    for first in range(0, DIM, 32):
        total = _half(total + q[..., first : first + 32] @ k[..., first : first + 32].mT)
    return total


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def from_bits(first: Tensor) -> Tensor:
    """P of the FP16 numbers whose last bits are E4M3's: the first line, and the second of what is not normal."""
    bits = torch.maximum(first, _half(first * 0.1875 + 836)).clamp(min=1024).floor() - 1024
    return bits.to(torch.uint8).view(torch.float8_e4m3fn).float()


def errors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    truth = torch.softmax(q.double() @ k.double().mT * DIM**-0.5, -1) @ v.double()
    values = quantize(v).dequantized()
    q8, k8 = (quantize(x, rotate=True).dequantized() for x in (q, k))
    p = torch.exp2((q8 @ k8.mT) * UNIT + 8 - ((q8 @ k8.mT) * UNIT).amax(-1, keepdim=True))
    made = {"exact": (p, p), "cast": (p.to(torch.float8_e4m3fn).float(), p)}

    (q8, of_q), (k8, of_k) = short(q), short(k)
    scores, unit = scores_in_fp16(q8, k8), of_q * of_k.mT * UNIT
    most, slope = (scores * unit).amax(-1, keepdim=True), _half(8 * unit)
    steps, quarters = (8 * most + CUT).floor(), (32 * most + 4 * CUT + 0.2).floor()
    room = (most.abs() / 64).floor()
    placed = from_bits(_half(scores * slope + _half(ONE_OF_P + quarters - 5 * steps - room)))
    start = ONE_OF_P - CUT - 8 * most
    above = from_bits(_half(scores * slope + _half((start - start.abs() * 2**-11).floor())))
    middle = _half(((most + CUT / 8) / unit).clamp(-32000, 32000))
    top = from_bits(_half(_half(scores - middle) * slope + _half(ONE_OF_P - 8 * (most + CUT / 8 - middle * unit))))
    made |= {"placed": (placed, placed), "above": (above, above), "top": (top, top)}
    return {
        name: float((p @ values / summed.sum(-1, keepdim=True) - truth).square().mean().sqrt())
        for name, (p, summed) in made.items()
    }


def inputs() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Those of the sweeps; wider scores; values around 1; and one key that has much of every row."""
    generator, shape = torch.Generator().manual_seed(1), (1, 2, LENGTH, DIM)
    drawn = {name: each.draw(shape, generator) for name, each in DISTRIBUTIONS.items()}
    q, k, v = DISTRIBUTIONS["normal"].draw(shape, generator)
    drawn["scores × 6"] = 6 * q, k, v
    drawn["V around 1"] = q, k, 1 + v / 10
    for size in (5, 8, 10, 12):
        way = torch.nn.functional.normalize(torch.randn(DIM, generator=generator), dim=0)
        of_one = (torch.arange(LENGTH) == 0)[:, None]
        drawn[f"a key of {size}"] = (
            q + size * way,
            torch.where(of_one, way * DIM**0.5, k),
            torch.where(of_one, 0, v + 1),
        )
    return {
        name: (q.bfloat16().float(), k.bfloat16().float(), v.bfloat16().float()) for name, (q, k, v) in drawn.items()
    }


def main() -> None:
    print(f"torch {torch.__version__}; N {LENGTH}, D {DIM}: RMSE of cast; over it")
    for name, three in inputs().items():
        found = errors(*three)
        line = ", ".join(f"{way} {found[way] / found['cast']:.3f}" for way in ("exact", "placed", "above", "top"))
        print(f"{name:12}: {found['cast']:.2e}; {line}", flush=True)


if __name__ == "__main__":
    main()
