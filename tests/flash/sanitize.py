"""A small run of every kernel, for compute-sanitizer (see CONTRIBUTING).

Lengths that are no multiple of a block, so that every edge is crossed.
"""

from __future__ import annotations

from typing import Any

import torch

from assay import flash_attention
from assay.flash.decode import attention_with_cache
from assay.flash.numerics import Numerics
from assay.flash.rotary import Rotary

LENGTH = 203
KNOBS = (
    Numerics(reverse_keys=True),
    Numerics(row_sum="bf16", rescale="bf16", output_accumulator="bf16"),
    Numerics(probabilities="fp16", sum_after_cast=True),
    Numerics(probabilities="fp32"),
    Numerics(block=(64, 32)),
)


def main() -> None:
    torch.manual_seed(0)
    for dim in (64, 128, 256):
        for how in ({}, {"causal": True}, {"window": (40, 3)}, {"window": (192, 0)}):
            run(f"D {dim} {how}", dim, **how)
        run(f"D {dim} packed", dim, causal=True, cu_seqlens_q=ints(0, 70, 70, 133, LENGTH))
        run(f"D {dim} in fp16", dim, torch.float16, causal=True)
        run(f"D {dim} ALiBi", dim, alibi_slopes=torch.rand(4, device="cuda"), causal=True)
        for numerics in KNOBS:
            run(f"D {dim} {numerics.encoded()}", dim, causal=True, numerics=numerics)
        run(f"D {dim} knobs in fp16", dim, torch.float16, numerics=Numerics(probabilities="bf16", row_sum="fp16"))
    run("D 59 in FP32", 59, torch.float32, causal=True)
    run("bias", 64, bias=draw(1, 4, LENGTH, LENGTH).requires_grad_())
    run("dropout", 64, dropout_p=0.2)
    run("sinks, softcap", 128, sinks=torch.zeros(4, device="cuda"), softcap=3.0, causal=True)
    cos, sin = (torch.rand(LENGTH, 32, device="cuda") for _ in range(2))
    packed = ints(0, 70, 70, 133, LENGTH)
    for interleaved in (False, True):
        for dtype in (torch.bfloat16, torch.float16):
            run(f"rotary {interleaved=} {dtype}", 64, dtype, rotary=Rotary(cos, sin, interleaved))
        run(f"rotary {interleaved=} packed", 128, rotary=Rotary(cos, sin, interleaved), cu_seqlens_q=packed)
    for pages in (False, True):
        for dtype in (torch.bfloat16, torch.float16):
            decode(pages, dtype)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda", dtype=torch.int32)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def run(name: str, dim: int, dtype: torch.dtype = torch.bfloat16, **how: Any) -> None:
    q, k, v = (draw(1, heads, LENGTH, dim, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    flash_attention(q, k, v, **how).float().sum().backward()
    torch.cuda.synchronize()
    print(name, flush=True)


def decode(pages: bool, dtype: torch.dtype) -> None:
    q, lengths = draw(2, 4, 3, 128, dtype=dtype), ints(1100, 37)
    table = torch.randperm(40, device="cuda").to(torch.int32).view(2, 20) if pages else None
    shape = (40, 2, 64, 128) if pages else (2, 2, 1200, 128)
    k, v = (draw(*shape, dtype=dtype) for _ in range(2))
    attention_with_cache(q, k, v, lengths=lengths, block_table=table)
    torch.cuda.synchronize()
    print(f"decode {pages=} {dtype}", flush=True)


if __name__ == "__main__":
    main()
