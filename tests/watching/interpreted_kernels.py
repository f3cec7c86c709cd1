"""The watch's kernels in Triton's interpreter, on the CPU, against what plain torch finds there.

Run as `python -m tests.watching.interpreted_kernels` with TRITON_INTERPRET=1, which Triton reads when it is imported:
hence a process of its own. The interpreter's bf16 is not right.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.formats.dtypes import format_of
from assay.watching import scores, sums, triton_scores, triton_sums


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_scores(dtype: torch.dtype, keys: int) -> None:
    """Rows as they come, causal ones, ones with ties, ones that see nothing, by −inf or by a large number; a NaN."""
    s = 3 * draw(2, 3, 7, keys)
    s[:, :, 1] = s[:, :, 1].masked_fill(torch.arange(keys) > keys // 2, -math.inf)
    s[:, :, 2, :2] = 20.0
    s[:, :, 3], s[:, :, 4] = -math.inf, -1e38
    s[:, :, 5, : keys // 2] = -1e38
    s[0, 0, 6, 0] = math.nan
    blind = (s == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    ours = triton_scores.of_rows(s, dtype, scores.HIDDEN)
    torch.testing.assert_close(ours, scores.of_rows(s, p, dtype), rtol=1e-12, atol=1e-12, equal_nan=True)
    assert ours[3, :, :, 2].all()
    assert not ours[3, :, :, 3:5].any()


def check_sums(dtype: torch.dtype, shape: tuple[int, ...], broken: bool) -> None:
    """One lies otherwise in memory; `broken` with what is not finite: in one, in all, and not the same in two."""
    golden = draw(*shape)
    actual, other = ((golden + 1e-3 * draw(*shape, seed=seed)).to(dtype) for seed in (1, 2))
    golden[0, 0, 0, 0] = 0.0
    if broken:
        actual[0, 0, 1, 1] = other[0, 0, 1, 2] = golden[0, 1, 1, 3] = math.nan
        for x in (actual, other, golden):
            x[0, 1, 2, 1], x[0, 1, 2, 2] = math.inf, math.nan
        actual[0, 1, 2, 3], golden[0, 1, 2, 3] = math.inf, -math.inf
    other = other.transpose(1, 2).contiguous().transpose(1, 2)
    x, y, z = (x[:, :1, : shape[2] // 2].transpose(2, 3) for x in (actual, other, golden))
    threes = [(actual, other, golden), (x, y, z)]
    found = triton_sums.of_tensors(threes, format_of(dtype))
    expected = [sums._by_pieces(*three, format_of(dtype), sums._finite) for three in threes]
    for ours, theirs in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.cat(theirs, 1), rtol=1e-12, atol=1e-12)
    assert (found[0][10].sum() > 0) == broken
    assert found[0][16, : shape[1]].sum() == (~actual.isfinite()).sum()


def check_batches() -> None:
    """Tensors of one call and of several batch sizes, with what is not finite: as plain torch finds it, carefully."""
    for batches in ((2, 2), (2, 1)):
        golden = [draw(batch, 2, 30, 16, seed=batch) for batch in batches]
        golden[0][0, 0, 0, 0] = math.nan
        threes = [(x.float(), (x + 1e-3).float(), x) for x in golden]
        plainly = sums._of_tensors(threes, format_of(torch.float32), careful=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sums, "fused", lambda x: True)
            found = sums._of_tensors(threes, format_of(torch.float32), careful=False)
        torch.testing.assert_close(found, plainly, rtol=1e-12, atol=1e-12)


def main() -> None:
    check_batches()
    for dtype in (torch.float16, torch.float32, torch.float64):
        for keys in (5, 600):
            check_scores(dtype, keys)
        for shape in ((1, 2, 5, 4), (2, 3, 90, 64)):
            for broken in (False, True):
                check_sums(dtype, shape, broken)
    print("all agree")


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
