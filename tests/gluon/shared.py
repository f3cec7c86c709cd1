# mypy: ignore-errors
"""Shared memory: allocations with who wrote and read each grain last, and views of them."""

from __future__ import annotations

import builtins as _py
import linecache
import os

import numpy as np

from tests.gluon.dtypes import float8e5
from tests.gluon.errors import EmuError, current, options, show, where
from tests.gluon.layouts import _offsets
from tests.gluon.tensors import Accumulator, Tensor, _Type


class Allocation:
    """Bytes of shared memory, with who wrote and read each grain last."""

    def __init__(self, cta, nbytes, dtype, shape):
        self.cta, self.nbytes, self.place = cta, nbytes, where(8)
        self.dtype, self.shape = dtype, shape
        self.bytes = np.empty(-(-nbytes // 16) * 16, np.uint8)
        self.bytes[:] = 0xFF  # NaN in every float format, −1 in integers
        if dtype is float8e5:
            self.bytes[:] = 0x7F
        self.views = {}
        self.barriers: dict = {}
        self.grain = 16 if nbytes >= 2048 else dtype.itemsize
        n = -(-nbytes // self.grain)
        self.write_agent = np.zeros(n, np.int32)
        self.write_epoch = np.zeros(n, np.int64)
        self.write_id = np.full(n, -1, np.int64)
        self.reads: dict[int, tuple] = {}
        self.unfenced = np.zeros(n, np.int32)  # number + 1 of the partition that wrote it generically, unfenced
        self.n = n

    def flat(self, dtype):
        view = self.views.get(dtype)
        if view is None:
            view = self.views[dtype] = self.bytes.view(dtype.np)
        return view

    @property
    def name(self):
        """The kernel's line that allocated it."""
        if not self.place:
            return "shared memory"
        file, line, _ = self.place[-1]
        return f"`{linecache.getline(file, line).strip()}` ({os.path.basename(file)}:{line})"


class Smem:
    """A view of shared memory: offsets of its elements in its allocation."""

    def __init__(self, alloc, dtype, at, layout, label=""):
        self.alloc, self.dtype, self.at, self.layout, self.label = alloc, dtype, at, layout, label
        self.shape = list(at.shape)
        self._views, self._grains = {}, None
        self.handle = self

    @property
    def type(self):
        return _Type(self.dtype, self.shape, self.layout)

    rank = property(lambda self: len(self.shape))
    numel = property(lambda self: self.at.size)

    def __repr__(self):
        return f"{self.alloc.name}{self.label}"

    @property
    def grains(self):
        if self._grains is None:
            self._grains = np.unique(self.at * self.dtype.itemsize // self.alloc.grain)
            size = self._grains.size
            if size and self._grains[-1] - self._grains[0] + 1 == size:  # a slice is quicker
                self._grains = _py.slice(int(self._grains[0]), int(self._grains[-1]) + 1)
        return self._grains

    def _view(self, key, make):
        if key not in self._views:
            self._views[key] = make()
        return self._views[key]

    def index(self, index):
        i = int(index)
        if not 0 <= i < self.shape[0]:
            raise EmuError(f"index {i} of {self}, which has {self.shape[0]}\n{show(where())}")
        return self._view(i, lambda: Smem(self.alloc, self.dtype, self.at[i], self.layout, f"{self.label}[{i}]"))

    def slice(self, start, length, dim=0):
        for x in (start, length, dim):
            if isinstance(x, Tensor):
                raise EmuError(f"slice() takes compile-time numbers, got a run-time {x}\n{show(where())}")
        if start < 0 or start + length > self.shape[dim]:
            raise EmuError(f"slice({start}, {length}, dim={dim}) of shape {self.shape}\n{show(where())}")
        cut = tuple(_py.slice(start, start + length) if d == dim else _py.slice(None) for d in range(self.rank))
        return self._view(
            ("slice", start, length, dim),
            lambda: Smem(
                self.alloc, self.dtype, self.at[cut], self.layout, f"{self.label}.slice({start},{length},{dim})"
            ),
        )

    def permute(self, order):
        order = tuple(int(i) for i in order)
        return self._view(
            ("permute", order),
            lambda: Smem(self.alloc, self.dtype, self.at.transpose(order), self.layout, f"{self.label}.permute{order}"),
        )

    def reshape(self, shape):
        shape = [int(s) for s in shape]
        return self._view(
            ("reshape", tuple(shape)),
            lambda: Smem(self.alloc, self.dtype, self.at.reshape(shape), self.layout, f"{self.label}.reshape{shape}"),
        )

    def _reinterpret(self, dtype, shape, layout):
        shape = [int(s) for s in shape]
        return self._view(("as", dtype.name, tuple(shape), layout), lambda: self._as(dtype, shape, layout))

    def _as(self, dtype, shape, layout):
        start, end = int(self.at.min()) * self.dtype.itemsize, (int(self.at.max()) + 1) * self.dtype.itemsize
        at = _offsets(shape, layout, dtype)
        need = (int(at.max()) + 1) * dtype.itemsize
        if end - start != self.at.size * self.dtype.itemsize:
            raise EmuError(f"_reinterpret of {self}: a view that is not one piece of memory\n{show(where())}")
        if need > end - start:
            raise EmuError(
                f"_reinterpret of {self} ({end - start} bytes) as {dtype}{shape}: that takes {need} bytes\n"
                f"{show(where())}"
            )
        swizzle = getattr(layout, "swizzle_byte_width", 0)
        if swizzle and start % (8 * swizzle):
            raise EmuError(
                f"_reinterpret of {self} at byte {start}: {swizzle}-byte swizzles repeat every "
                f"{8 * swizzle} bytes, so it must begin at a multiple of that\n{show(where())}"
            )
        return Smem(self.alloc, dtype, at + start // dtype.itemsize, layout, f"{self.label} as {dtype}{shape}")

    def load(self, layout=None):
        task = current()
        task.point()
        task.check_read(self, task.agent, task.clock, task.clock[task.agent], "load")
        return Tensor(self.get(), self.dtype, layout)

    def store(self, value):
        task = current()
        if isinstance(value, Accumulator):
            value.refuse()
        if not isinstance(value, Tensor):
            raise EmuError(f"store of {value!r}: it takes a tensor\n{show(where())}")
        if value.shape != self.shape or value.dtype is not self.dtype:
            raise EmuError(
                f"store of {value.dtype}{value.shape} into {self.dtype}{self.shape} {self}: shape and dtype "
                f"must be the same\n{show(where())}"
            )
        task.point()
        task.check_write(self, task.agent, task.clock, task.clock[task.agent], "store")
        if options.fences:
            self.alloc.unfenced[self.grains] = task.number + 1
            task.unfenced.add(self.alloc)
        self.put(value.a)

    def _keep_alive(self):
        pass

    # without checks
    def get(self):
        return self.alloc.flat(self.dtype).take(self.at)

    def put(self, a):
        self.alloc.flat(self.dtype)[self.at] = a
