"""A small run of every kernel, for sanitizers (see CONTRIBUTING): `sanitize.py`, or `sanitize.py "D 64" FP8`.

With words, only what has one of them in its name: all of it takes minutes. Lengths that are no multiple of a block, so
that every edge is crossed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton

from assay import flash_attention
from assay.flash.decode import attention_with_cache
from assay.flash.fp8 import FP8
from assay.flash.numerics import Numerics
from assay.flash.rotary import Rotary

LENGTH = 203
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (40, 3)}, {"window": (192, 0)})
KNOBS = (
    Numerics(reverse_keys=True),
    Numerics(row_sum="bf16", rescale="bf16", output_accumulator="bf16"),
    Numerics(probabilities="fp16", sum_after_cast=True),
    Numerics(probabilities="fp32"),
    Numerics(block=(64, 32)),
)
Run = tuple[str, Callable[[], object]]
"""A name, and what runs the kernels."""


def runs() -> Iterator[Run]:
    packed = ints(0, 70, 70, 133, LENGTH)
    for dim in (64, 128, 256):
        for how in MASKS:
            yield both(f"D {dim} {how}", dim, **how)
        yield both(f"D {dim} packed", dim, causal=True, cu_seqlens_q=packed)
        yield both(f"D {dim} in fp16", dim, torch.float16, causal=True)
        yield both(f"D {dim} ALiBi", dim, alibi_slopes=torch.rand(4, device="cuda"), causal=True)
        yield both(f"D {dim} softcap", dim, softcap=3.0, causal=True)
        yield both(f"D {dim} deterministic", dim, deterministic=True, causal=True)
        for numerics in KNOBS:
            yield both(f"D {dim} {numerics.encoded()}", dim, causal=True, numerics=numerics)
        yield both(
            f"D {dim} knobs in fp16", dim, torch.float16, numerics=Numerics(probabilities="bf16", row_sum="fp16")
        )
        for two_level in (False, True):
            for how in MASKS:
                yield eight_bits(f"D {dim} FP8 {two_level=} {how}", dim, FP8(two_level=two_level), **how)
        yield eight_bits(f"D {dim} FP8 E5M2", dim, FP8(format="e5m2", rotate=False, scaling="head"), softcap=3.0)
    yield both("D 59 in FP32", 59, torch.float32, causal=True)
    yield both("bias", 64, bias=draw(1, 4, LENGTH, LENGTH).requires_grad_())
    yield both("dropout", 64, dropout_p=0.2)
    yield both("sinks, softcap", 128, sinks=torch.zeros(4, device="cuda"), softcap=3.0, causal=True)
    cos, sin = (torch.rand(LENGTH, 32, device="cuda") for _ in range(2))
    for interleaved in (False, True):
        for dtype in (torch.bfloat16, torch.float16):
            yield both(f"rotary {interleaved=} {dtype}", 64, dtype, rotary=Rotary(cos, sin, interleaved))
        yield both(f"rotary {interleaved=} packed", 128, rotary=Rotary(cos, sin, interleaved), cu_seqlens_q=packed)
    for pages in (False, True):
        for dtype in (torch.bfloat16, torch.float16):
            yield f"decode {pages=} {dtype}", partial(decode, pages, dtype)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda", dtype=torch.int32)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def inputs(dim: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [draw(1, heads, LENGTH, dim, dtype=dtype) for heads in (4, 2, 2)]


def both(name: str, dim: int, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Run:
    """Forward and backward."""

    def run() -> None:
        q, k, v = (x.requires_grad_() for x in inputs(dim, dtype))
        flash_attention(q, k, v, **how).float().sum().backward()

    return name, run


def eight_bits(name: str, dim: int, fp8: FP8, **how: Any) -> Run:
    return name, lambda: flash_attention(*inputs(dim), fp8=fp8, **how)


def decode(pages: bool, dtype: torch.dtype) -> None:
    q, lengths = draw(2, 4, 3, 128, dtype=dtype), ints(1100, 37)
    table = torch.randperm(40, device="cuda").to(torch.int32).view(2, 20) if pages else None
    shape = (40, 2, 64, 128) if pages else (2, 2, 1200, 128)
    k, v = (draw(*shape, dtype=dtype) for _ in range(2))
    attention_with_cache(q, k, v, lengths=lengths, block_table=table)


def main(words: list[str]) -> None:
    torch.manual_seed(0)
    # Triton's own sanitizer keeps its notes there. What is set is set for one thread: backward runs in this one, too.
    triton.set_allocator(lambda size, align, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    torch.autograd.set_multithreading_enabled(False)
    wanted = [(name, run) for name, run in runs() if not words or any(word in name for word in words)]
    if not wanted:
        sys.exit(f"Of the names of these runs none has {' or '.join(map(repr, words))} in it.")
    for name, run in wanted:
        run()
        torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
