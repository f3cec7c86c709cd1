"""What the Hopper backward's producer brings: tile after tile of keys, and the blocks of rows that see them."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from assay.flash.kernels.gluon_names import copy_in
from assay.flash.kernels.hopper_keys import blocks_of, first_block, work_of
from assay.flash.kernels.hopper_queue import claim, tell_tile
from assay.flash.kernels.hopper_shared import ROWS, clean, stage_of

KEYS = gl.constexpr(2 * 64)  # of a CTA
STAGES = gl.constexpr(2)


class Buffers(NamedTuple):
    """Shared memory and the barriers that say when it is full and when it may be written again."""

    q: Any
    do: Any
    lse: Any
    delta: Any
    k: Any
    """Two tiles: the next one's first S and this one's last dQ are computed in the same step."""
    v: Any
    """One tile; each consumer reads its own half only."""
    ds: Any
    """(rows, keys): of each stage, those of both consumers."""
    out: Any
    """On their way to memory, dQ, dV and dK: one of each consumer."""
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    rows_full: Any
    """Q and LSE, dO and delta."""
    rows_empty: Any
    ds_full: Any
    ds_empty: Any
    leaning: Any
    """D 64, near ALiBi: what `lean_of_keys` is multiplied by."""
    raw: Any
    """Packed: a tile is there, and not yet cleaned."""
    next: Any
    """The number of the next tile, from the producer to the others."""
    next_full: Any
    next_empty: Any


@gluon.jit
def bring(tiles, batch, head, before, first, length, full, raw, buffer, cleaned, PACKED: gl.constexpr):
    """A tile by the copy engine; where another packed sequence follows in it, cleaned. How often, so far, is returned.

    `full` expects one arrival beside the bytes.
    """
    place = [batch, head, before + first, 0]
    if PACKED and first + buffer.shape[0] > length:
        mbarrier.expect(raw, tiles.block_type.nbytes)
        copy_in(tiles, place, raw, buffer)
        mbarrier.wait(raw, cleaned & 1)
        clean(buffer, length - first)
        mbarrier.arrive(full, count=1)
        cleaned += 1
    else:
        mbarrier.expect(full, tiles.block_type.nbytes)
        copy_in(tiles, place, full, buffer)
    return cleaned


@gluon.jit
def bring_rows(
    tiles, lines, rows, numbers, full, raw, work, head, line, block, stage, cleaned,
    PACKED: gl.constexpr, ROW_PARTS: gl.constexpr,
):  # fmt: skip
    """A block of Q and its LSE, or of dO and delta."""
    for i in gl.static_range(ROW_PARTS):
        first = block * (ROW_PARTS * ROWS) + i * ROWS
        cleaned = bring(
            tiles, work.batch, head, work.before_q, first, work.len_q, full, raw, rows.index(stage * ROW_PARTS + i),
            cleaned, PACKED,
        )  # fmt: skip
        mbarrier.expect(full, lines.block_type.nbytes)
        copy_in(lines, [line + first], full, numbers.index(stage * ROW_PARTS + i))
    return cleaned


@gluon.jit
def produce(
    q_tiles, do_tiles, k_tiles, v_tiles, lse_lines, delta_lines, counter, buffers, places, span, room, batches, heads,
    kv_heads, group, together,
    ROW_PARTS: gl.constexpr, ALONE: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Tile after tile: K and V, and block after block of rows, each into the place the consumers left longest ago."""
    PACKED: gl.constexpr = places is not None
    SIZE: gl.constexpr = ROW_PARTS * ROWS
    blocks = blocks_of(places, span, KEYS)
    tiles = blocks * batches * kv_heads
    tile = gl.program_id(0) * (blocks if ALONE else 1)
    count = 0
    step = 0
    cleaned = 0
    while tile < tiles:
        work = work_of(tile, places, span, batches, kv_heads, together, KEYS, SIZE)
        begin = step
        first = first_block(work, KEYS, APART)
        for member in range(group):
            head = work.kv_head * group + member
            line = (work.batch * heads + head) * room + work.line
            for number in range(first, first + work.end - work.begin):
                block = gl.where(number < work.end, number, number - (work.end - work.begin))
                stage, phase = stage_of(step)
                mbarrier.wait(buffers.rows_empty.index(stage), phase ^ 1)
                rows_at = buffers.rows_full.index(stage), buffers.raw, work, head, line, block, stage
                cleaned = bring_rows(q_tiles, lse_lines, buffers.q, buffers.lse, *rows_at, cleaned, PACKED, ROW_PARTS)
                cleaned = bring_rows(
                    do_tiles, delta_lines, buffers.do, buffers.delta, *rows_at, cleaned, PACKED, ROW_PARTS
                )
                # K and V after the first rows: the last tile still reads V when these rows' stage is already free.
                if step == begin:
                    slot, phase = stage_of(count)
                    mbarrier.wait(buffers.k_empty.index(slot), phase ^ 1)
                    for i in gl.static_range(2):
                        cleaned = bring(
                            k_tiles, work.batch, work.kv_head, work.before_k, work.first_key + i * ROWS, work.len_k,
                            buffers.k_full.index(slot), buffers.raw, buffers.k.index(slot * 2 + i), cleaned, PACKED,
                        )  # fmt: skip
                    for i in gl.static_range(2):
                        mbarrier.wait(buffers.v_empty.index(i), (count & 1) ^ 1)
                        cleaned = bring(
                            v_tiles, work.batch, work.kv_head, work.before_k, work.first_key + i * ROWS, work.len_k,
                            buffers.v_full.index(i), buffers.raw, buffers.v.index(i), cleaned, PACKED,
                        )  # fmt: skip
                step += 1
        if ALONE:
            tile += 1
            if tile % blocks == 0:
                tile = claim(counter, batches * kv_heads) * blocks
        else:
            tile = claim(counter, tiles)
        tell_tile(tile, buffers, count)
        count += 1
