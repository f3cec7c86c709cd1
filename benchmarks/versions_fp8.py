"""Versions of the FP8 kernel beside each other and beside our bf16 forward, in one process, on one Hopper GPU.

    git show REVISION:src/assay/flash/kernels/hopper_fp8.py > before.py
    python benchmarks/versions_fp8.py before.py src/assay/flash/kernels/hopper_fp8.py

Each file is a whole kernel module with today's arguments; 16,384 tokens, hidden size 2048, inputs quantised before by
today's code, in CUDA graphs that take turns. A version is first held against FP64: its RMSE over the first one's.
Exits with 1 if that is above 1.1.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from assay import flash_attention
from assay.cases.attention.inputs import DISTRIBUTIONS
from assay.flash import fp8_launch
from assay.flash.fp8 import FP8
from benchmarks.bench_flash import Work, captured, draw, milliseconds
from tests.flash.reference import reference_attention

POINTS = itertools.product((128, 256, 64), (8192, 16384), (False, True))
ROUNDS = 12
MOST = 1.1


def kernel_of(file: str, number: int) -> Any:
    """Under a name of its own: Triton keys its cache by it, and reads the source again from the file."""
    spec = spec_from_file_location(f"fp8_version_{number}", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.attention_forward_fp8_hopper


def attended(kernel: Any, ready: fp8_launch.All, like: torch.Tensor, causal: bool, two_level: bool | None) -> Any:
    """Output and LSE by this version."""
    out, lse = torch.empty_like(like), torch.empty(like.shape[:3], dtype=torch.float32, device=like.device)
    vars(fp8_launch)["attention_forward_fp8_hopper"] = kernel
    fp8_launch.attend(ready, out, lse, None, like.shape[3] ** -0.5, None, 0 if causal else None, None, two_level)
    return out, lse


def errors(kernels: list[Any], dim: int, distribution: str) -> list[tuple[float, float]]:
    """RMSE of each version's output against FP64, and the largest error of its LSE."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (x.cuda().bfloat16() for x in DISTRIBUTIONS[distribution].draw((1, 4, 4096, dim), generator))
    truth, truth_lse = reference_attention(q.double(), k.double(), v.double(), scale=dim**-0.5)
    ready = fp8_launch.quantize_all(q, k, v, dim**-0.5, FP8())
    found = []
    for kernel in kernels:
        out, lse = attended(kernel, ready, q, False, None)
        rmse = float((out.double() - truth).square().mean().sqrt())
        found.append((rmse, float((lse.double() - truth_lse).abs().max())))
    return found


def times(kernels: list[Any], dim: int, length: int, causal: bool) -> dict[str, float]:
    """Milliseconds of bf16 and of each version, by its number and by levels of sums."""
    sets = [[x.detach() for x in each] for each in draw(length, dim, sets=2)]
    ready = [fp8_launch.quantize_all(q, k, v, dim**-0.5, FP8()) for q, k, v in sets]
    works = {"bf16": captured(lambda: [partial(flash_attention, *each, causal=causal) for each in sets])}
    for two_level, (number, kernel) in itertools.product((False, True)[: 2 if dim <= 128 else 1], enumerate(kernels)):
        calls: list[Work] = [
            partial(attended, kernel, made, each[0], causal, two_level) for each, made in zip(sets, ready, strict=True)
        ]
        works[f"{number}:{1 + two_level}"] = captured(partial(list, calls))
    return dict(zip(works, (each / len(sets) for each in milliseconds(list(works.values()), ROUNDS)), strict=True))


def main() -> None:
    kernels = [kernel_of(file, number) for number, file in enumerate(sys.argv[1:])]
    good = True
    for dim, distribution in itertools.product((64, 128, 256), ("normal", "outliers", "uniform")):
        found = errors(kernels, dim, distribution)
        ratios = [rmse / found[0][0] for rmse, _ in found]
        good &= max(ratios) <= MOST
        pairs = zip(found, ratios, strict=True)
        line = ", ".join(f"{rmse:.2e} ({ratio:.3f}, LSE {off:.1e})" for (rmse, off), ratio in pairs)
        print(f"RMSE D {dim:3} {distribution:8}: {line}", flush=True)
    for dim, length, causal in POINTS:
        flops = 4 * 16384 * 2048 * length / (2 if causal else 1)
        taken = times(kernels, dim, length, causal)
        line = "  ".join(f"{who} {flops / ms / 1e9:.0f} ({taken['bf16'] / ms:.3f})" for who, ms in taken.items())
        print(f"TFLOP/s D {dim:3} N {length:5} {'causal' if causal else 'full  '} {line}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
