"""How exact the exponential inside torch's CPU flash kernel is, read off the log-sum-exp that it returns.

    python benchmarks/kernel_exponential.py

One key scores 0 and 15 keys score −x, so that the log-sum-exp is log(1 + 15·exp(−x)): solved for exp(−x).
"""

from __future__ import annotations

import torch


def relative_errors(dtype: torch.dtype) -> torch.Tensor:
    x = (torch.arange(1, 257) / 64).to(dtype)  # exact in all three
    q = torch.zeros(1, 1, 256, 16, dtype=dtype)
    q[0, 0, :, 0] = x
    k = torch.zeros(1, 1, 16, 16, dtype=dtype)
    k[0, 0, 1:, 0] = -1
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _, lse = kernel(q, k, torch.ones_like(k), scale=1.0)
    found = (lse[0, 0].double().exp() - 1) / 15
    exact = torch.exp(-x.double())
    errors: torch.Tensor = (found - exact) / exact
    return errors


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        errors = relative_errors(dtype)
        print(f"{dtype}: largest {errors.abs().max().item():.1e}, mean {errors.mean().item():+.1e}")
