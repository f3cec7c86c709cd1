# mypy: ignore-errors
"""Layouts. Those of registers are only kept; those of shared memory give the addresses of the card."""

from __future__ import annotations

import builtins as _py
import math

import numpy as np

from tests.gluon.errors import EmuError, Unsupported, show, where


class DistributedLayout:
    cga_layout: tuple = ()


class SharedLayout:
    cga_layout: tuple = ()


def _hashable(x):
    return tuple(map(_hashable, x)) if isinstance(x, (list, tuple)) else x


class _LayoutEq:
    def _key(self):
        return (type(self).__name__, *(_hashable(v) for v in vars(self).values()))

    def __eq__(self, other):
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class BlockedLayout(_LayoutEq, DistributedLayout):
    def __init__(self, size_per_thread, threads_per_warp, warps_per_cta, order, cga_layout=None):
        self.size_per_thread, self.threads_per_warp = size_per_thread, threads_per_warp
        self.warps_per_cta, self.order = warps_per_cta, order
        if math.prod(threads_per_warp) != 32:
            raise EmuError(f"{self}: threads_per_warp must multiply to 32\n{show(where())}")

    rank = property(lambda self: len(self.order))


class SliceLayout(_LayoutEq, DistributedLayout):
    def __init__(self, dim, parent):
        self.dim, self.parent = dim, parent

    rank = property(lambda self: self.parent.rank - 1)


class DotOperandLayout(_LayoutEq, DistributedLayout):
    def __init__(self, operand_index, parent, k_width):
        self.operand_index, self.parent, self.k_width = operand_index, parent, k_width

    rank = property(lambda self: self.parent.rank)


class NVMMADistributedLayout(_LayoutEq, DistributedLayout):
    def __init__(self, version, warps_per_cta, instr_shape, cga_layout=None):
        self.version, self.warps_per_cta, self.instr_shape = version, warps_per_cta, instr_shape

    rank = property(lambda self: len(self.warps_per_cta))


class DistributedLinearLayout(_LayoutEq, DistributedLayout):
    def __init__(self, reg_bases, lane_bases, warp_bases, block_bases, shape):
        self.reg_bases, self.lane_bases, self.warp_bases = reg_bases, lane_bases, warp_bases
        self.block_bases, self.shape = block_bases, shape

    rank = property(lambda self: len(self.shape))


class AutoLayout(_LayoutEq, DistributedLayout):
    rank = None


class CoalescedLayout(_LayoutEq, DistributedLayout):
    rank = None


class NVMMASharedLayout(_LayoutEq, SharedLayout):
    def __init__(
        self, swizzle_byte_width, element_bitwidth, rank=2, transposed=False, fp4_padded=False, cga_layout=None
    ):
        self.swizzle_byte_width, self.element_bitwidth = swizzle_byte_width, element_bitwidth
        self.rank, self.transposed, self.fp4_padded = rank, transposed, fp4_padded

    @staticmethod
    def get_default_for(block_shape, dtype, transposed=False, fp4_padded=False, cga_layout=None):
        shape = list(block_shape)
        if transposed:
            shape = shape[1:] + shape[:1]
        width = shape[-1] * dtype.primitive_bitwidth // 8
        swizzle = next((s for s in (128, 64, 32) if width >= s and width % s == 0), 0)
        if len(block_shape) < 2 or math.prod(shape[:-1]) < 8:
            swizzle = 0
        return NVMMASharedLayout(swizzle, dtype.primitive_bitwidth, len(block_shape), transposed)

    def offsets(self, shape, dtype):
        """Element offsets of one tile of this shape, as the hardware lays it out."""
        if dtype.bits != self.element_bitwidth:
            raise EmuError(f"{self} for elements of {dtype.bits} bits\n{show(where())}")
        if self.transposed:
            return np.moveaxis(self._plain(shape[1:] + shape[:1], dtype), -1, 0)
        return self._plain(shape, dtype)

    def _plain(self, shape, dtype):
        rows, columns, size = math.prod(shape[:-1]), shape[-1], dtype.itemsize
        swizzle = self.swizzle_byte_width
        width = swizzle // size if swizzle else _py.min(columns, 256)
        if columns % width:
            raise EmuError(
                f"a tile of shape {shape} of {dtype} has rows of {columns * size} bytes, not a multiple of "
                f"the swizzle width {swizzle}: {self}\n{show(where())}"
            )
        r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
        at = (c // width * rows * width + r * width + c % width) * size
        if swizzle:
            at ^= ((at >> 7) & (swizzle // 16 - 1)) << 4
        return (at // size).reshape(shape)


class SwizzledSharedLayout(_LayoutEq, SharedLayout):
    def __init__(self, vec, per_phase, max_phase, order, cga_layout=None):
        self.vec, self.per_phase, self.max_phase, self.order = vec, per_phase, max_phase, order

    rank = property(lambda self: len(self.order))

    def offsets(self, shape, dtype):
        order = self.order if len(self.order) == len(shape) else list(range(len(shape)))[::-1]
        grid = np.indices(shape)
        if self.max_phase > 1 and len(shape) >= 2:
            inner, outer = order[0], order[1]
            phase = (grid[outer] // self.per_phase) % self.max_phase
            grid[inner] = ((grid[inner] // self.vec) ^ phase) * self.vec + grid[inner] % self.vec
        at, stride = np.zeros(shape, np.int64), 1
        for dim in order:
            at += grid[dim] * stride
            stride *= shape[dim]
        return at


class PaddedSharedLayout(_LayoutEq, SharedLayout):
    def __init__(self, *args, **kwargs):
        raise Unsupported("PaddedSharedLayout is not emulated (AMD)")


class SharedLinearLayout(_LayoutEq, SharedLayout):
    def __init__(self, offset_bases, block_bases=None, alignment=16):
        self.offset_bases, self.alignment = offset_bases, alignment

    rank = property(lambda self: len(self.offset_bases[0]))

    def offsets(self, shape, dtype):
        at = np.zeros(shape, np.int64)
        grid = np.arange(math.prod(shape))
        place = [np.zeros_like(grid) for _ in shape]
        for bit, basis in enumerate(self.offset_bases):
            for dim, b in enumerate(basis):
                place[dim] ^= ((grid >> bit) & 1) * b
        at[tuple(place)] = grid
        return at


class MBarrierLayout(SwizzledSharedLayout):
    def __init__(self, cga_layout=None):
        super().__init__(1, 1, 1, [0])


_OFFSETS: dict = {}


def _offsets(shape, layout, dtype):
    """Of a whole allocation: leading dimensions beyond the layout's rank count tiles."""
    key = (tuple(shape), layout, dtype.name)
    if key not in _OFFSETS:
        rank = _py.min(layout.rank, len(shape))
        lead, tile = list(shape[: len(shape) - rank]), list(shape[len(shape) - rank :])
        one = np.asarray(layout.offsets(tile, dtype))
        n = math.prod(lead)
        at = np.arange(n).reshape([*lead, *[1] * rank]) * one.size + one.reshape([*[1] * len(lead), *tile])
        _OFFSETS[key] = np.ascontiguousarray(at.astype(np.int64))
    return _OFFSETS[key]
