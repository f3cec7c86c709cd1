"""One call of each kernel, for Nsight Compute to count what it does; prints nothing itself.

    ncu --clock-control none -k regex:attention_ --section SpeedOfLight --section SchedulerStats \\
        --metrics smsp__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active,smsp__inst_executed.sum \\
        python benchmarks/profile_flash.py

16,384 tokens of hidden size 2048 in bf16, N 4096: D 64 and D 128, plain, then with softcap; forward, then backward.
"""

from __future__ import annotations

import torch

import assay

TOKENS, HIDDEN, LENGTH, SOFTCAP = 16_384, 2_048, 4_096, 30.0


def main() -> None:
    torch.manual_seed(0)
    for dim in (64, 128):
        shape = (TOKENS // LENGTH, HIDDEN // dim, LENGTH, dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        for softcap in (None, SOFTCAP):
            out = assay.flash_attention(q, k, v, softcap=softcap)
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
