"""The kernels of decoding in Triton's interpreter, on the CPU.

Run as `python -m tests.flash.interpreted_decode` with TRITON_INTERPRET=1, which Triton reads when it is imported: hence
a process of its own. The interpreter's bf16 is not right.
"""

from __future__ import annotations

import numpy as np
import torch

from assay.flash import decode, decode_launch

from .decode_cases import CASES, IN_FP32, Case, Drawn, check, check_invariance


def check_hidden_keys() -> None:
    """Keys before the window are not read: NaN there reaches nothing."""
    case = Case(lengths=(190, 200), window=(40, 0), queries=2, splits=2)
    drawn = Drawn(case, torch.float32)
    how = drawn.arguments()
    out = decode.attention_with_cache(**how)
    for cache in (drawn.k_cache, drawn.v_cache):
        for b, length in enumerate(case.each):
            cache[b, :, : length - 2 - 40] = torch.nan
    assert torch.equal(decode.attention_with_cache(**how), out)


def main() -> None:
    decode.by_sequence = decode_launch.launch  # what CUDA tensors get
    for name, case in CASES.items():
        for dtype in (torch.float16, torch.float32) if name in IN_FP32 else (torch.float16,):
            try:
                check(case, dtype)
            except BaseException as e:
                e.add_note(f"{name}, {dtype}")
                raise
    check_invariance(torch.float16)
    check_invariance(torch.float16, page=64, sinks=True, alibi=True, window=(700, 0))
    check_hidden_keys()
    print(f"{len(CASES)} cases agree")


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
