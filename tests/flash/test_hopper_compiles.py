"""The Hopper kernels' machine code, without a GPU.

No register too early, no number in a barrier's place; and where the kernels' speed was measured, no spill in a loop, no
serialised products. `make tritons` runs these tests with other Tritons, whose assemblers differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from assay.flash import fp8_launch, gpu, hopper, hopper_forward, launch
from assay.flash.fp8 import FP8
from tests.flash.cases import Case, Drawn
from tests.flash.machine_code import code_of, compiling, complaints, hurried, read, repurposed, spills, unset

CASES = {
    "packed": Case(packed=((200, 200), (77, 140), (130, 130))),
    "causal": Case(queries=513, keys=513, causal=True),
    "window": Case(queries=600, keys=600, window=(100, 0)),
    "gqa, alibi": Case(queries=260, keys=260, causal=True, alibi=True, heads=(8, 2)),
    "alibi, no mask": Case(queries=513, keys=513, alibi=True),
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
EARLY = """
        /*0000*/ HGMMA.64x64x16.F32.BF16 R152, gdesc[UR52], RZ, !UPT, gsb0 ;
        /*0010*/ HGMMA.64x256x16.F32.BF16 R24, R184, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0020*/ FADD R0, R152, R153 ;
        /*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0040*/ @!P0 BRA `(.L_x_1) ;
        /*0050*/ MUFU.EX2 R188, R152 ;
        /*0060*/ F2FP.BF16.F32.PACK_AB R187, R188, R153 ;
        /*0070*/ LDS.128 R20, [R3] ;
        /*0080*/ LDS.128 R21, [R3] ;
        /*0090*/ STS [R3], R151 ;
.L_x_1:
        /*00a0*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00b0*/ F2FP.BF16.F32.PACK_AB R187, R188, R153 ;
        /*00c0*/ FMUL R24, R24, R2 ;
        /*00d0*/ EXIT ;
"""
"""The next P in the registers that a product reads this one from, as ptxas made it, and other haste."""
SHARED_WITH_A_BARRIER = """
        /*0000*/ @!UP1 SYNCS.EXCH.64 URZ, [UR7+0x28000], UR8 ;
        /*0010*/ SYNCS.EXCH.64 URZ, [UR7+0x28010], UR8 ;
        /*0020*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9+0x28010], R18 ;
        /*0030*/ @P0 STS [UR14+0x28000], R0 ;
        /*0040*/ LDS R3, [UR14+0x28000] ;
        /*0050*/ LDS R3, [UR14+0x28008] ;
        /*0060*/ STS.128 [R5+UR4+0x27ff8], R8 ;
        /*0070*/ STS.64 [R5+UR4+0x27ff8], R8 ;
        /*0080*/ LDS R3, [UR14+0x28014] ;
        /*0090*/ LDS.U8 R3, [R14+0x28014] ;
        /*00a0*/ EXIT ;
"""
"""The next tile's number in the place of a barrier that nobody uses, as Triton put it."""
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

SHARED = 227 * 1024
"""Bytes of shared memory that a CTA can have."""
MEASURED = triton.__version__.startswith(("3.6.", "3.7."))
"""Whether the speed of this Triton's code was, or that of the same assembler's."""


@contextmanager
def on_hopper() -> Iterator[list[Any]]:
    """Calls on CPU tensors go where those on an H200's would, and are compiled only."""
    with pytest.MonkeyPatch.context() as patch, compiling() as kernels:
        patch.setattr(hopper, "can", lambda call: max(call.q.shape[3], call.v.shape[3]) in hopper.DIMS)
        patch.setattr(hopper, "SHORT", {64: 0, 128: 0})  # dQ is added up, also of few keys
        patch.setattr(gpu, "processors", lambda index: 132)
        patch.setattr(fp8_launch, "_has_room", lambda index: True)
        for module in (hopper, hopper_forward):
            patch.setattr(module, "counter", lambda device: torch.zeros(1, dtype=torch.int32))
        yield kernels


def check(kernels: list[Any], full: bool = False) -> None:
    """`full`: with ALiBi and groups the registers do not hold all; 32 instructions, in two consumers, are the most."""
    for kernel in kernels:
        code = code_of(kernel)
        assert unset(code) == [], kernel.name
        assert hurried(code) == [], kernel.name
        assert repurposed(code) == [], kernel.name
        assert kernel.metadata.shared <= SHARED, kernel.name
        if MEASURED:
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
    gluon = [kernel for kernel in kernels if kernel.name.endswith("hopper")]
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
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_of_small_heads_with_a_softcap(deterministic: bool) -> None:
    case = Case(queries=513, keys=513, causal=True, softcap=30.0, dims=(64, 64), batch=1)
    call = replace(Drawn(case, torch.bfloat16).call(), deterministic=deterministic)
    with on_hopper() as kernels:
        launch.backward(call, torch.zeros_like(call.q), torch.zeros(call.q.shape[:3]), call.q, None, False)
    check([kernel for kernel in kernels if "hopper" in kernel.name])


@pytest.mark.parametrize(
    ("keys", "dim", "deterministic", "expected"),
    [(1024, 128, False, False), (1025, 128, False, True), (1025, 128, True, False), (1024, 64, False, True)],
)
def test_where_dq_is_added_up(
    monkeypatch: pytest.MonkeyPatch, keys: int, dim: int, deterministic: bool, expected: bool
) -> None:
    monkeypatch.setattr(hopper, "can", lambda call: True)
    monkeypatch.setattr(gpu, "processors", lambda index: 132)
    call = Drawn(Case(queries=keys, keys=keys, dims=(dim, dim), batch=1), torch.bfloat16).call()
    assert hopper.adds_up(replace(call, deterministic=deterministic)) is expected


@pytest.mark.slow
def test_short_sequences_of_small_heads() -> None:
    case = Case(queries=300, keys=300, causal=True, dims=(64, 64), batch=1)
    with on_hopper() as kernels:
        launch.forward(Drawn(case, torch.bfloat16).call())
    assert [kernel.name for kernel in kernels] == ["attention_forward_hopper"]
    check(kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"causal": True}, {"window": (1100, 0)}, {"causal": True, "alibi": True}], ids=lambda how: "+".join(how)
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_that_see_many_keys(dim: int, how: dict[str, Any]) -> None:
    call = Drawn(Case(queries=1200, keys=1200, dims=(dim, dim), batch=1, **how), torch.bfloat16).call()
    assert hopper_forward.shape_of(call).consumers == (3 if dim == 64 else 2)
    with on_hopper() as kernels:
        launch.forward(call)
    check(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("how", [(None, 0, None), (None, None, None), (700, 0, None), (None, 0, 30.0)], ids=str)
@pytest.mark.parametrize("dim", [128, 256])
def test_fp8(dim: int, how: tuple[int | None, int | None, float | None]) -> None:
    q, k, v = torch.zeros(3, 1, 2, 300, dim, dtype=torch.bfloat16)
    with on_hopper() as kernels:
        fp8_launch.forward(q, k, v, None, 0.1, *how, FP8(two_level=False))
        fp8_launch.forward(q, k, v, None, 0.1, *how, FP8(two_level=True))
    check([kernel for kernel in kernels if kernel.name == "attention_forward_fp8_hopper"])
    assert [kernel.metadata.shared <= SHARED for kernel in kernels if kernel.name == "quantize_blocks"] == 6 * [True]


def test_spills_are_found() -> None:
    masked = TURN.replace("MOV", "@P1 BRA `(.L_x_2)").replace("NOP", "STL [R1], R4")
    assert spills(read(TURN)) == []
    assert spills(read(masked)) == []
    assert spills(read(TURN.replace("MOV", "LDL R4, [R1]"))) == ["LDL R4, [R1]"]
    assert spills(read(masked.replace("EXTRA", "STL [R1], R5"))) == ["STL [R1], R5"]


def test_stale_registers_are_found() -> None:
    table = BROKEN.replace("@!P2 BRA `(.L_x_1)", 'BRX R6 -0x1c0 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)')
    for listing in (BROKEN, table.replace("        /*0020*/", ".L_x_0:\n        /*0020*/")):
        assert unset(read(listing)) == ["HGMMA.64x128x16.F32.BF16 R24, R204, gdesc[UR12], R24"]


def test_barriers_with_numbers_in_them_are_found() -> None:
    assert repurposed(read(SHARED_WITH_A_BARRIER)) == [
        "@P0 STS [UR14+0x28000], R0",
        "LDS R3, [UR14+0x28000]",
        "STS.128 [R5+UR4+0x27ff8], R8",
        "LDS R3, [UR14+0x28014]",
    ]


def test_haste_is_found() -> None:
    assert hurried(read(EARLY)) == [
        "FADD R0, R152, R153",
        "F2FP.BF16.F32.PACK_AB R187, R188, R153",
        "LDS.128 R21, [R3]",
        "STS [R3], R151",
    ]
