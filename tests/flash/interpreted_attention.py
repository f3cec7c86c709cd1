"""Run the attention kernels in Triton's interpreter, in FP32 and FP16, and hold them to the reference.

A program of its own, since TRITON_INTERPRET must be set before Triton is imported. Programs run one after the other
there and bf16 products are wrong, so races and bf16 are for a GPU.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace

import numpy as np
import torch

from assay import Plan, deviation, tiled_attention
from assay.flash import launch
from assay.flash.call import Call
from assay.flash.numerics import Numerics
from assay.flash.tuning import KERNELS, Tile, trying
from tests.flash.cases import CASES, Case, Drawn, check_against_plain, ours

SMALL = {kernel: Tile(32, 32, 4, 1) for kernel in KERNELS}
ONE_LOOP = {kernel: Tile(16, 32, 4, 1, False) for kernel in KERNELS}
MORE = {
    "dims over 128": Case(batch=1, heads=(2, 1), dims=(136, 130), causal=True, queries=50, keys=50),
    "few queries": Case(batch=1, heads=(4, 2), queries=3, keys=1100, dims=(32, 32), causal=True, lse_gradient=True),
    "bias, packed by nothing": Case(batch=1, bias=(1, 1, 1, 0), keys=33, causal=True),
}


def attention_cases() -> int:
    """Every feature; the last few dtypes and tiles by turns, to save time."""
    checked = 0
    for i, (name, case) in enumerate((CASES | MORE).items()):
        dtype, tiles = ((torch.float32, SMALL), (torch.float16, SMALL), (torch.float32, ONE_LOOP))[i % 3]
        if name == "alibi, causal":  # 16-bit inputs have a way of their own there
            dtype = torch.float16
        small = replace(case, batch=1) if case.batch > 1 and case.packed is None else case
        with trying(tiles):
            try:
                check_against_plain(Drawn(small, dtype), lambda drawn: ours(drawn, launch))
            except AssertionError as error:
                raise AssertionError(f"{name}, {dtype}: {error}") from error
        checked += 1
    return checked


def layouts() -> int:
    """Inputs that the copy engine cannot read, sinks and slopes with strides: as their dense copies."""
    dense = torch.randn(1, 2, 41, 24, generator=torch.Generator().manual_seed(1))
    flat = torch.empty(dense.numel() + 1)
    flat[1:] = dense.flatten()
    given = {
        "begins between 16 bytes": flat[1:].view(dense.shape),
        "heads last": dense[..., :21].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "windows over a row": torch.arange(80.0).sin().unfold(-1, 24, 1)[None, None, :41].expand(1, 2, 41, 24),
        "one for all heads": dense[:, :1].expand(1, 2, 41, 24),
    }
    for name, x in given.items():
        call = Call(q=x, k=x, v=x, scale=0.2, right=0)
        copied = replace(call, q=x.contiguous(), k=x.contiguous(), v=x.contiguous())
        with trying(SMALL):
            for mine, theirs in zip(launch.forward(call), launch.forward(copied), strict=True):
                assert torch.equal(mine, theirs), name
            out, lse = launch.forward(copied)
            first, second = (launch.backward(c, out, lse, x, None, needs_bias=False) for c in (call, copied))
            assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True)), name
    return len(given)


def knobs() -> int:
    """The kernel with its knobs turned against the emulation that rounds the same steps, in FP16."""
    drawn = Drawn(Case(batch=1, heads=(2, 2), queries=64, keys=96, dims=(32, 32)), torch.float16)
    shipped = Plan.shipped("fp16")
    turned = [
        (Numerics(), shipped, {}),
        (Numerics(row_sum="fp16"), shipped.replace(row_sum="fp16"), {}),
        (Numerics(rescale="fp16"), shipped.replace(rescale="fp16"), {}),
        (Numerics(output_accumulator="fp16"), shipped.replace(output_accumulator="fp16"), {}),
        (Numerics(probabilities="fp32"), shipped.replace(probabilities="fp32"), {}),
        (Numerics(sum_after_cast=True), shipped, {"sum_after_cast": True}),
        (Numerics(reverse_keys=True, row_sum="fp16"), shipped.replace(row_sum="fp16"), {"reverse_keys": True}),
    ]
    for numerics, plan, how in turned:
        with trying(SMALL):
            mine, _ = launch.forward(replace(drawn.call(), numerics=numerics))
        emulated = tiled_attention(drawn.q, drawn.k, drawn.v, plan=plan, block=(32, 32), exp2=True, **how)  # type: ignore[arg-type]
        equal = (mine == emulated).double().mean().item()
        assert equal >= 0.95, f"{numerics}: only {equal:.1%} of the elements have equal bits"
        assert deviation(mine, emulated).max <= 2**-10, f"{numerics}"
    return len(turned)


def main() -> None:
    """Everything; prints how much that was."""
    np.seterr(all="ignore")  # the interpreter computes log(0) and −inf + inf where the kernel does
    print(f"{attention_cases()} cases, {layouts()} layouts, {knobs()} knobs")


if __name__ == "__main__":
    main()
