"""`torch.compile(mode="reduce-overhead")` as the first in its process that calls `flash_attention`; run by `test_gpu`.

torch then puts into the memory of a CUDA graph what the calls allocate, and raises an error where anything of it stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from assay import flash_attention
from tests.flash.gpu_inputs import inputs


def calling(how: dict[str, Any]) -> Callable[..., torch.Tensor]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attention(q, k, v, causal=True, **how)
        return out * 1

    return call


def main() -> None:
    ends = torch.tensor([0, 100, 256], device="cuda", dtype=torch.int32)
    hows: list[dict[str, Any]] = [{}, {"cu_seqlens_q": ends}]
    if torch.cuda.get_device_capability()[0] == 9:
        hows.append({"fp8": True})
    for how in hows:
        call = calling(how)
        compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
        for seed in range(4):  # warmed up, recorded, replayed
            given = [x.detach().requires_grad_("fp8" not in how) for x in inputs(4, 256, 128, seed=seed)]
            out = compiled(*given)
            results, wanted = [out], [call(*given)]
            for each in (results, wanted) if "fp8" not in how else ():
                each += torch.autograd.grad(each[0].float().square().sum(), given)
            for found, expected in zip(results, wanted, strict=True):
                assert torch.equal(found, expected), (how, seed)
        print(*how, "agrees")


if __name__ == "__main__":
    main()
