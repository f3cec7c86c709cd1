"""The rotary kernel in Triton's interpreter against the CPU code.

Run as `python -m tests.flash.interpreted_rotary` with TRITON_INTERPRET=1, which Triton reads when it is imported:
hence a process of its own. The interpreter's bf16 is not right, so fp32 and fp16.
"""

from __future__ import annotations

import torch

from assay.flash.kernels import rotary as kernel
from assay.flash.rotary import rotate_one

from .rotary_cases import CASES, Turn, tables


def check(case: Turn, dtype: torch.dtype) -> None:
    x, (cos, sin, _) = case.x(dtype), tables(case.half, torch.float32)
    offsets, cu = case.tensors()
    expected = rotate_one(x, cos, sin, offsets, cu, case.interleaved, case.inverse)
    for spread in (cos, cos.repeat_interleave(3, 1)[:, ::3]):  # tables of other strides
        out = torch.full_like(x, torch.nan)
        kernel.launch(x, out, spread, sin, offsets, cu, interleaved=case.interleaved, inverse=case.inverse)
        # numpy multiplies and adds as torch does, but torch may fuse the two
        torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=2 * torch.finfo(torch.float32).eps)


def check_beyond_the_tables() -> None:
    x, (cos, sin, _) = torch.ones(1, 1, 4, 6), tables(2, torch.float32, positions=5)
    out = torch.zeros_like(x)
    kernel.launch(x, out, cos, sin, torch.tensor([3], dtype=torch.int32), None, interleaved=False, inverse=False)
    assert out[..., :2, :].isfinite().all()
    assert out[..., 2:, :4].isnan().all()
    assert (out[..., 4:] == 1).all()


def main() -> None:
    for case in CASES.values():
        for dtype in (torch.float32, torch.float16):
            check(case, dtype)
    check_beyond_the_tables()
    vars(kernel)["_LARGEST_GRID"] = 2  # more heads, and more sequences, than a launch takes
    several = [case for case in CASES.values() if max(case.shape[:2]) > 2]
    assert several
    for case in (*several, Turn(shape=(5, 3, 21, 16), offsets=(0, 3, 1, 2, 7))):
        check(case, torch.float32)
    print(f"{len(CASES)} cases agree")


if __name__ == "__main__":
    main()
