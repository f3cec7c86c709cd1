"""The Hopper kernels, compiled without a GPU: no spill in a loop, no serialised products, no stale register."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from assay.flash import fp8_launch, hopper, hopper_forward_tiles, launch
from assay.flash.fp8 import FP8
from tests.flash.cases import Case, Drawn
from tests.flash.machine_code import code_of, compiling, complaints, read, spills, unset

CASES = {
    "packed": Case(packed=((200, 200), (77, 140), (130, 130))),
    "causal": Case(queries=513, keys=513, causal=True),
    "window": Case(queries=600, keys=600, window=(100, 0)),
    "gqa, alibi": Case(queries=260, keys=260, causal=True, alibi=True, heads=(8, 2)),
}
BROKEN = """
        /*0000*/ UMOV UR18, 0x1 ;
        /*0010*/ @!P2 BRA `(.L_x_1) ;
        /*0020*/ UMOV UR14, UR18 ;
        /*0030*/ UMOV UR15, 0x40000040 ;
        /*0040*/ HGMMA.64x128x16.F32.BF16 R24, R212, gdesc[UR12], RZ, !UPT ;
        /*0050*/ EXIT ;
.L_x_1:
        /*0060*/ HGMMA.64x128x16.F32.BF16 R24, R204, gdesc[UR12], R24 ;
        /*0070*/ EXIT ;
"""
"""As ptxas made it of two arms of an `if`."""


TURN = """
.L_x_1:
        /*0000*/ HGMMA.64x128x16.F32.BF16 R24, R212, gdesc[UR12], R24 ;
        /*0010*/ MOV ;
        /*0020*/ NOP ;
.L_x_2:
        /*0030*/ EXTRA ;
        /*0040*/ @P0 BRA `(.L_x_1) ;
        /*0050*/ EXIT ;
"""
"""A loop, with room for more."""


@contextmanager
def on_hopper() -> Iterator[list[Any]]:
    """Calls on CPU tensors go where those on an H200's would, and are compiled only."""
    with pytest.MonkeyPatch.context() as patch, compiling() as kernels:
        patch.setattr(hopper, "can", lambda call: max(call.q.shape[3], call.v.shape[3]) in hopper.DIMS)
        patch.setattr(hopper, "processors", lambda index: 132)
        patch.setattr(fp8_launch, "_processors", lambda index: 132)
        for module in (hopper, hopper_forward_tiles):
            patch.setattr(module, "counter", lambda device: torch.zeros(1, dtype=torch.int32))
        yield kernels


def check(kernels: list[Any], full: bool = False) -> None:
    """`full`: with ALiBi and groups the registers do not hold all; 32 instructions, in two consumers, are the most."""
    for kernel in kernels:
        code = code_of(kernel)
        assert unset(code) == [], kernel.name
        assert len(spills(code)) <= (32 if full else 0), kernel.name
        assert complaints(kernel) == [], kernel.name


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention(dim: int, name: str) -> None:
    call = Drawn(replace(CASES[name], dims=(dim, dim), batch=1), torch.bfloat16).call()
    with on_hopper() as kernels:
        out, lse = launch.forward(call)
        launch.backward(call, out, lse, torch.zeros_like(out), None, False)
        launch.backward(replace(call, deterministic=True), out, lse, torch.zeros_like(out), None, False)
    gluon = [kernel for kernel in kernels if kernel.name.endswith(("hopper", "large", "tiles"))]
    assert len(gluon) == {64: 4, 128: 4, 256: 5}[dim]
    check(gluon, full=call.slopes is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "gqa, alibi"])
@pytest.mark.parametrize("dim", [64, 128])
def test_backward_of_heads_alone(monkeypatch: pytest.MonkeyPatch, dim: int, name: str) -> None:
    monkeypatch.setattr(hopper, "alone", lambda call: True)
    call = Drawn(replace(CASES[name], dims=(dim, dim), batch=1), torch.bfloat16).call()
    with on_hopper() as kernels:
        launch.backward(call, torch.zeros_like(call.q), torch.zeros(call.q.shape[:3]), call.q, None, False)
    check([kernel for kernel in kernels if "hopper" in kernel.name], full=call.slopes is not None)


@pytest.mark.slow
def test_short_sequences_of_small_heads() -> None:
    case = Case(queries=300, keys=300, causal=True, dims=(64, 64), batch=1)
    with on_hopper() as kernels:
        launch.forward(Drawn(case, torch.bfloat16).call())
    assert [kernel.name for kernel in kernels] == ["attention_forward_tiles"]
    check(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, 256])
def test_fp8(dim: int) -> None:
    q, k, v = torch.zeros(3, 1, 2, 300, dim, dtype=torch.bfloat16)
    with on_hopper() as kernels:
        fp8_launch.forward(q, k, v, None, 0.1, None, 0, None, FP8())
    (kernel,) = (kernel for kernel in kernels if kernel.name == "attention_forward_fp8")
    check([kernel])


def test_spills_are_found() -> None:
    masked = TURN.replace("MOV", "@P1 BRA `(.L_x_2)").replace("NOP", "STL [R1], R4")
    assert spills(read(TURN)) == []
    assert spills(read(masked)) == []
    assert spills(read(TURN.replace("MOV", "LDL R4, [R1]"))) == ["LDL R4, [R1]"]
    assert spills(read(masked.replace("EXTRA", "STL [R1], R5"))) == ["STL [R1], R5"]


def test_stale_registers_are_found() -> None:
    assert unset(read(BROKEN)) == ["HGMMA.64x128x16.F32.BF16 R24, R204, gdesc[UR12], R24"]
