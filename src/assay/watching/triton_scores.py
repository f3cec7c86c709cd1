"""`scores.of_rows` in one kernel: a program reads one row of scores, once from memory and once from the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
"""Keys of a row that one warp takes at a time: with more warps than one they would wait for each other."""
_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """As torch rounds FP64: to FP32 first."""
    if DTYPE != tl.float64:  # noqa: SIM300
        x = x.to(tl.float32).to(DTYPE).to(tl.float32)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(
    scores: tl.tensor, found: tl.tensor, keys: int, HIDDEN: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """found[:, row] = the lowest visible score, the highest, the entropy, and whether the highest is shared."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * keys
    at = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], -float("inf"), tl.float64)
    for start in tl.range(0, keys, BLOCK, loop_unroll_factor=4):
        tops = tl.maximum(tops, tl.load(scores + start + at, mask=start + at < keys, other=-float("inf")))
    most = tl.max(tops, 0)
    base = tl.where(most == -float("inf"), 0.0, most)
    totals, weighted = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    lows, ties = tl.full([BLOCK], float("inf"), tl.float64), tl.zeros([BLOCK], tl.int32)
    for start in range(0, keys, BLOCK):
        s = tl.load(scores + start + at, mask=start + at < keys, other=-float("inf"))
        share, visible = tl.exp(s - base), s > HIDDEN
        totals += share
        weighted += share * tl.where(visible, s - base, 0.0)
        lows = tl.minimum(lows, tl.where(visible, s, float("inf")))
        ties += (_rounded(s, DTYPE) == _rounded(most, DTYPE)).to(tl.int32)
    total, low = tl.sum(totals, 0), tl.min(lows, 0)
    entropy = tl.where(total == 0, 0.0, tl.log(total)) - tl.where(most > HIDDEN, tl.sum(weighted, 0) / total, 0.0)
    nan = (total != total) & (most < float("inf"))  # max and min pass over them
    out = found + row
    tl.store(out, tl.where(nan, total, low))
    tl.store(out + tl.num_programs(0), tl.where(nan, total, most))
    tl.store(out + 2 * tl.num_programs(0), tl.where(entropy < 0, 0.0, entropy))
    tl.store(out + 3 * tl.num_programs(0), ((most > HIDDEN) & (tl.sum(ties, 0) > 1)).to(tl.float64))


def of_rows(s: Tensor, dtype: torch.dtype, hidden: float) -> Tensor:
    """See `scores.of_rows`; `s` stays as it is, and there are no sinks."""
    s, keys = s.contiguous(), s.shape[-1]
    found = s.new_empty(4, *s.shape[:-1])
    # Triton launches on the current device, which need not be theirs. For a CPU tensor this does nothing.
    with torch.cuda.device_of(s):
        block = min(_BLOCK, triton.next_power_of_2(keys))
        _row_kernel[(s.numel() // keys,)](
            s, found, keys, hidden, _DTYPES[dtype], block, num_warps=1, enable_fp_fusion=True
        )
    return found
