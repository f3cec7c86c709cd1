"""The Hopper kernels as this Triton compiles them, without a GPU: instructions, and what would make them slow.

With another Triton, after `make tritons`: PYTHONPATH=.venv/triton-3.9.0 .venv/bin/python benchmarks/machine_code.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))

from assay.flash import fp8_launch, launch
from assay.flash.call import Call
from assay.flash.fp8 import FP8
from tests.flash.cases import Case, Drawn
from tests.flash.machine_code import code_of, complaints, spills
from tests.flash.test_hopper_compiles import CASES, on_hopper

SOFTCAP = {"softcap": Case(queries=513, keys=513, causal=True, softcap=30.0)}


def calls() -> Iterator[tuple[str, Call]]:
    for dim in (64, 128, 256):
        for name, case in (CASES | SOFTCAP).items():
            yield f"D {dim}, {name}", Drawn(replace(case, dims=(dim, dim), batch=1), torch.bfloat16).call()


def show(name: str, kernels: list[Any]) -> None:
    for kernel in kernels:
        if "hopper" in kernel.name:
            code = code_of(kernel)
            counts = len(code.instructions), len(spills(code)), len(complaints(kernel))
            print(f"{name:16} {kernel.name:34} {counts[0]:6} {counts[1]:6} {counts[2]:6}", flush=True)


def main() -> None:
    print(f"Triton {triton.__version__}; instructions, those in loops that use memory for registers, products in a row")
    for name, call in calls():
        with on_hopper() as kernels:
            out, lse = launch.forward(call)
            launch.backward(call, out, lse, torch.zeros_like(out), None, False)
            launch.backward(replace(call, deterministic=True), out, lse, torch.zeros_like(out), None, False)
        show(name, kernels)
    for dim in (128, 256):
        q, k, v = torch.zeros(3, 1, 2, 300, dim, dtype=torch.bfloat16)
        with on_hopper() as kernels:
            fp8_launch.forward(q, k, v, None, 0.1, None, 0, None, FP8())
        show(f"D {dim}, causal", kernels)


if __name__ == "__main__":
    main()
