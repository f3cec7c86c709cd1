"""The golden value's kernels compile for Hopper without one, and multiply on its matrix units."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from assay.watching.call import AttentionCall
from assay.watching.exact import _fits

DOUBLES = [
    "q",
    "k",
    "v",
    "grad",
    "out",
    "dq",
    "dk",
    "dv",
    "factors",
    "found",
    "p",
    "ds",
    "bias",
    "slopes",
    "sinks",
    "numbers",
]


@pytest.mark.slow
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_they_multiply_in_fp64_on_matrix_units(dim: int, adjusted: bool) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from assay.watching import triton_golden as kernels

    forward, rows, keys = kernels.TILES[dim]
    common = {"GROUP": 3, "DIM": dim, "VALUE_DIM": dim - 24 * adjusted, "WIDE": dim, "VALUE_WIDE": dim}
    adjusting = dict.fromkeys(("BIAS", "SLOPES", "SOFTCAP"), adjusted)
    one = {
        "HIDDEN": -1e30,
        "DTYPE": triton.language.bfloat16,
        "SINKS": adjusted,
        "ROWS": forward.own,
        "KEYS": forward.step,
    }
    spans: dict[str, Any] = {"ROWS": rows.own, "SPAN": keys.own}
    for kernel, constants, tile in (
        (kernels._forward, common | adjusting | one, forward),
        (kernels._row_gradients, common | adjusting | spans | {"KEYS": rows.step}, rows),
        (kernels._key_gradients, common | spans | {"DEPTH": keys.step}, keys),
    ):
        names = kernel.arg_names
        types = {name: "constexpr" if name in constants else "*fp64" if name in DOUBLES else "i32" for name in names}
        aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name in (*DOUBLES, "width")}
        options = {"num_warps": tile.warps, "num_stages": 2, "enable_fp_fusion": True}
        done = triton.compile(ASTSource(kernel, types, constants, aligned), GPUTarget("cuda", 90, 32), options)
        assert re.search(r"mma\.sync\.aligned\.m\d+n8k\d+\.row\.col\.f64\.f64\.f64\.f64", done.asm["ptx"])
        assert done.metadata.shared < 227 << 10


@pytest.mark.parametrize(
    ("shape", "mask", "fits"),
    [
        ((1, 2, 64, 128), None, True),
        ((1, 2, 63, 64), None, False),
        ((1, 2, 64, 129), None, False),
        ((1, 2, 1 << 14, 8), (1, 1, 1 << 14, 1 << 14), False),
        ((2, 2, 1 << 13, 8), (1, 1, 1 << 13, 1 << 13), True),
    ],
)
def test_what_they_are_for(shape: tuple[int, ...], mask: tuple[int, ...] | None, fits: bool) -> None:
    q = torch.empty(shape, device="meta")
    bias = None if mask is None else torch.empty(mask, device="meta").expand(*shape[:2], -1, -1)
    assert _fits(AttentionCall(q=q, k=q, v=q, scale=1.0, bias=bias)) == fits
