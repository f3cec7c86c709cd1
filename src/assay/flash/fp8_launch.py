"""Runs the FP8 kernels: quantisation on any CUDA device, attention on Hopper."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

from assay.flash import fp8 as quantisation
from assay.flash import gpu
from assay.flash.descriptors import gluon_tiles
from assay.flash.fp8 import BLOCK, FP8, LARGEST_PRODUCT, Quantized, room, shared_scales
from assay.flash.kernels.hopper_fp8 import Scales, attention_forward_fp8_hopper
from assay.flash.kernels.quantize import find_centres, quantize_blocks
from assay.flash.kernels.tile import Scores, Span
from assay.flash.lasting import lasting
from assay.flash.layout import is_aligned

_LOG2_E = 1.4426950408889634
_MOST_CAP = 2.0**24
"""A softcap beyond changes no score that FP16 holds, but what it makes of them FP16 does not hold."""
_TOGETHER = 16
"""Dimensions of which one program finds the centres: few, so that there are many programs."""


class Inputs(NamedTuple):
    """Of the kernel."""

    q: Quantized
    k: Quantized
    v: Quantized
    """Of `transposed_values`."""
    centres: torch.Tensor | None
    """What V is less; None: nothing, and sums have two levels."""


def centres(v: torch.Tensor) -> torch.Tensor:
    """See `fp8.centres`."""
    batch, heads, rows, dim = v.shape
    found = torch.empty(batch, heads, room(dim), dtype=torch.float32, device=v.device)
    if v.numel() == 0:
        return found.zero_()
    find_centres[(batch * heads, room(dim) // _TOGETHER)](
        v,
        v.stride(),
        found,
        rows,
        heads,
        DIM=dim,
        BLOCK_DIM=room(dim),
        ROWS=512,
        WIDTH=_TOGETHER,
        HUGE=quantisation.HUGE,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return found


def quantize(x: torch.Tensor, off: torch.Tensor | None, fp8: FP8, rotate: bool, short: bool) -> Quantized:
    """See `fp8.quantize`."""
    values = torch.empty(*x.shape[:3], room(x.shape[3]), dtype=fp8.dtype, device=x.device)
    return Quantized(values, _fill(x, off, values, fp8, rotate, short, transposed=False))


def transposed_values(v: torch.Tensor, off: torch.Tensor | None, fp8: FP8) -> Quantized:
    """V as the kernel takes it, (B, H, D, keys): whole blocks of keys, in the order of `in_thread_order`."""
    keys = triton.cdiv(v.shape[2], BLOCK) * BLOCK
    values = torch.empty(*v.shape[:2], room(v.shape[3]), keys, dtype=fp8.dtype, device=v.device)
    return Quantized(values, _fill(v, off, values, fp8, False, False, transposed=True))


def _fill(
    x: torch.Tensor,
    off: torch.Tensor | None,
    values: torch.Tensor,
    fp8: FP8,
    rotate: bool,
    short: bool,
    *,
    transposed: bool,
) -> torch.Tensor:
    """Fills `values`, and returns the scales."""
    batch, heads, rows, dim = x.shape
    blocks = triton.cdiv(rows, BLOCK)
    scales = torch.empty(batch, heads, blocks, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return scales.fill_(1.0)
    turns = _turns(room(dim), x.dtype, x.device) if rotate else None
    total = batch * heads * blocks
    programs, warps, stages = _how(x.device.index, x.dtype, room(dim), rotate)
    grid = (min(total, programs * gpu.processors(x.device.index)),)

    def run(out: torch.Tensor | None, scales: torch.Tensor, given: bool) -> None:
        quantize_blocks[grid](
            x,
            x.stride(),
            off,
            turns,
            scales,
            out,
            rows,
            heads,
            blocks,
            total,
            DIM=dim,
            BLOCK_DIM=room(dim),
            ROWS=BLOCK,
            LARGEST=torch.finfo(fp8.dtype).max,
            SMALLEST=quantisation.SMALLEST,
            LONGEST=quantisation.LONGEST if short else None,
            GIVEN=given,
            TRANSPOSED=transposed,
            STAGES=stages,
            num_warps=warps,
            enable_fp_fusion=True,
        )

    if fp8.scaling == "block":
        run(values, scales, False)
        return scales
    run(None, scales, False)
    scales = shared_scales(scales, fp8.scaling)
    run(values, scales, True)
    return scales


@cache
def _how(index: int, dtype: torch.dtype, dim: int, rotate: bool) -> tuple[int, int, int]:
    """Programs for each processor, warps, and blocks that are read at once. Measured on an H200.

    To rotate, two blocks of 256 numbers of 16 bits and the matrices lie in 168 KB of shared memory.
    """
    if not rotate:
        return 4, 4 if dim <= 128 else 8, 1
    if dtype.itemsize > 2 or not _has_room(index):
        return 4, 4, 1
    return 1, 8, 3 if dim <= 128 else 2


@cache
def _turns(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(D / 64, 64, 64) of ±1: Hadamard's matrix of 64 with the signs of each 64 rows of the rotation."""
    return lasting(lambda: (quantisation.signs(dim).view(-1, 64, 1) * quantisation.hadamard(64)).to(device, dtype))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    fp8: FP8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in q's dtype and LSE, on Hopper."""
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    quantised = quantize_all(q, k, v, scale, fp8)
    attend(quantised, out, lse, sinks, abs(scale), left, right, softcap)
    return out, lse


def quantize_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, fp8: FP8) -> Inputs:
    """As `attend` takes them; a negative scale's sign goes into Q."""
    turned = -q if scale < 0 else q
    off = None if fp8.in_two_levels(v.shape[3]) else centres(v)
    q8, k8 = (quantize(x, None, fp8, fp8.rotate, True) for x in (turned, k))
    return Inputs(q8, k8, transposed_values(v, off, fp8), off)


def attend(
    quantised: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
) -> None:
    """Fill `out` and `lse`.

    Two levels of sums at D_v 256 take two turns, each over half of V's dimensions.
    """
    q, k, v, off = quantised
    two_level = off is None
    value_dim, step = out.shape[3], v.values.shape[2]
    span = Span(q.values.shape[2], k.values.shape[2], left, right)
    if softcap is not None and softcap > _MOST_CAP:
        softcap = None
    unit = scale * _LOG2_E if softcap is None else scale / softcap
    scores = Scores(unit, None if softcap is None else softcap * _LOG2_E)
    if two_level:
        step = min(step, LARGEST_PRODUCT)
    scales = Scales(q.scales, k.scales, v.scales, v.scales.amax(2), q.scales.shape[2], k.scales.shape[2])
    batches, heads = q.values.shape[:2]
    dim = q.values.shape[3]
    consumers = _consumers(max(dim, step), two_level, softcap, left)
    tiles = triton.cdiv(q.values.shape[2], 64 * consumers) * batches * heads
    for first in range(0, value_dim, step):
        part = out[..., first : first + step]
        attention_forward_fp8_hopper[(min(tiles, gpu.processors(out.device.index)),)](
            gluon_tiles(q.values, 64),
            gluon_tiles(k.values, BLOCK),
            gluon_tiles(v.values[:, :, first : first + step], step, BLOCK),
            # Fewer dimensions: the copy engine's box is narrower than `buffers.out`.
            gluon_tiles(part, 64) if is_aligned(part) and part.shape[3] * 2 > step else None,
            part,
            part.stride()[:3],
            lse,
            sinks,
            torch.zeros(1, dtype=torch.int32, device=out.device),
            span,
            scores,
            scales,
            off,
            batches,
            heads,
            heads // k.values.shape[1],
            VALUE_DIM=part.shape[3],
            STAGES=4 if max(dim, step) <= 128 else 2,
            Q_IN_REGISTERS=dim <= 128 and not two_level,
            TWO_LEVEL=two_level,
            CONSUMERS=consumers,
            num_warps=4,
            enable_fp_fusion=True,
        )


def _consumers(dim: int, two_level: bool, softcap: float | None, left: int | None) -> int:
    """Three are faster, since somebody always multiplies: where the registers hold what they need, and the cache of
    instructions (128 KB, 8,192 of them) their code, which a window's third loop makes too long."""
    return 3 if dim <= 128 and not two_level and softcap is None and left is None else 2


@cache
def _has_room(index: int) -> bool:
    """Whether a program may have 227 KB of shared memory: data centres' GPUs from Hopper on."""
    return torch.cuda.get_device_properties(index).major in (9, 10)
