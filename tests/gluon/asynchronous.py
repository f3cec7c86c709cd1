# mypy: ignore-errors
"""Operations under way: wgmma, TMA loads and stores, writes to global memory."""

from __future__ import annotations

import numpy as np

from tests.gluon.errors import BarrierError, show, where
from tests.gluon.tensors import Accumulator, Tensor


class Mma:
    kind = "mma"

    def __init__(self, task, a, b, acc, use_acc, dtype):
        self.task, self.a, self.b, self.acc, self.use_acc, self.dtype = task, a, b, acc, use_acc, dtype
        self.performed, self.retired, self.result = False, False, None
        self.place = where(3)
        task.issued += 1
        self.number = task.issued

    def __repr__(self):
        return f"wgmma of {self.task.label}"

    def perform(self):
        if self.performed:
            return
        a = self.a.a if isinstance(self.a, Tensor) else self.a.get()
        value = a.astype(np.float32) @ self.b.get().astype(np.float32)
        if self.use_acc:
            acc = self.acc.op.result if isinstance(self.acc, Accumulator) else self.acc.a
            value = value + acc
        self.result = value.astype(self.dtype.np)
        self.performed = True
        self.a = self.b = self.acc = None


class TmaLoad:
    kind = "load"

    def __init__(self, task, desc, coord, barrier, smem, clock):
        self.task, self.desc, self.coord, self.barrier, self.smem, self.clock = task, desc, coord, barrier, smem, clock
        self.place = where(3)
        self.phase = barrier.phase

    def __repr__(self):
        return f"TMA load {self.coord} into {self.smem}"

    def perform(self):
        self.task.world.flying.remove(self)
        self.smem.put(self.desc.read(self.coord).reshape(self.smem.shape))
        if self.barrier.phase != self.phase:
            raise BarrierError(
                f"{self.barrier} ended its phase {self.phase} before a TMA load on it had come: expect() did not count "
                f"its {self.desc.block_type.nbytes} bytes before the last arrival. Issued at\n{show(self.place)}"
            )
        self.barrier.landed(self.desc.block_type.nbytes, self.clock)


class TmaStore:
    kind = "store"

    def __init__(self, task, desc, coord, smem, how):
        self.task, self.desc, self.coord, self.smem, self.how = task, desc, coord, smem, how
        self.place = where(3)
        self.performed = False
        task.stores_issued += 1
        self.number = task.stores_issued

    def __repr__(self):
        return f"TMA {self.how} {self.coord} from {self.smem}"

    def perform(self):
        """Reads shared memory. The global write comes later still."""
        if not self.performed:
            self.performed = True
            self.write = GlobalWrite(self, self.smem.get().reshape(self.desc.block_shape))
            self.task.world.flying.append(self.write)


class GlobalWrite:
    kind = "write"

    def __init__(self, store, data):
        self.store, self.data, self.task = store, data, store.task
        self.performed = False

    def perform(self):
        if not self.performed:
            self.performed = True
            if self in self.task.world.flying:
                self.task.world.flying.remove(self)
            self.store.desc.write(self.store.coord, self.data, self.store.how)
