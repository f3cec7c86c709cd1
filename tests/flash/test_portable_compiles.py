"""The portable kernels for GPUs that nobody here has: they compile, and fit what these have of shared memory.

Tiles are those of a GPU without a table.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from assay.flash import decode_launch, gpu, launch
from tests.flash import machine_code
from tests.flash.cases import Case, Drawn
from tests.flash.machine_code import compiling
from tests.flash.test_replay_decoding import cache_call

SHARED = {80: 163, 89: 99, 100: 227, 120: 99}
"""KB that a program can have (CUDA's programming guide, compute capabilities): A100; L4, RTX 4090; B200; RTX 5090."""
CASE = Case(queries=300, keys=300, causal=True, heads=(4, 2), alibi=True, sinks=True, batch=1)


@pytest.fixture(params=SHARED)
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    number: int = request.param
    monkeypatch.setattr(machine_code._Offline, "get_current_target", lambda self: GPUTarget("cuda", number, 32))
    monkeypatch.setattr(machine_code._Offline, "get_current_device", lambda self: number)  # Triton keeps its target
    monkeypatch.setattr(gpu, "processors", lambda index: 100)
    return number


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 256])
def test_attention(architecture: int, dim: int) -> None:
    call = Drawn(replace(CASE, dims=(dim, dim)), torch.bfloat16).call()
    with compiling() as kernels:
        out, lse = launch.forward(call)
        launch.backward(call, out, lse, torch.zeros_like(out), None, False)
    names = {"attention_forward", "attention_prepare_backward", "attention_backward_q", "attention_backward_kv"}
    assert {kernel.name for kernel in kernels} == names
    for kernel in kernels:
        assert kernel.metadata.target.arch == architecture
        assert kernel.metadata.shared <= SHARED[architecture] * 1024, kernel.name


@pytest.mark.slow
def test_decoding(architecture: int) -> None:
    with compiling() as kernels:
        decode_launch.launch(cache_call(True, splits=3))
    assert [kernel.name for kernel in kernels] == ["attention_decode", "merge_splits"]
    assert all(kernel.metadata.shared <= SHARED[architecture] * 1024 for kernel in kernels)
