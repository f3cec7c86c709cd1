# mypy: ignore-errors
"""`triton.experimental.gluon.language.nvidia.hopper`: mbarrier, tma, wgmma, fences."""

from __future__ import annotations

import builtins as _py

from tests.gluon.asynchronous import GlobalWrite, Mma, TmaLoad, TmaStore
from tests.gluon.barriers import Barrier
from tests.gluon.errors import BarrierError, EmuError, current, show, where
from tests.gluon.layouts import DotOperandLayout, MBarrierLayout, NVMMADistributedLayout, NVMMASharedLayout
from tests.gluon.memory import Descriptor, make_tensor_descriptor
from tests.gluon.shared import Smem
from tests.gluon.tensors import Accumulator, Tensor


def fence_async_shared(cluster=False):
    task = current()
    task.point()
    for alloc in task.unfenced:
        alloc.unfenced[alloc.unfenced == task.number + 1] = 0
    task.unfenced.clear()


def _barrier(smem, what):
    if not isinstance(smem, Smem) or smem.numel != 1:
        raise BarrierError(f"{what} needs one barrier (shape [1]), got {getattr(smem, 'shape', smem)}\n{show(where())}")
    bar = smem.alloc.barriers.get(int(smem.at.reshape(-1)[0]))
    if bar is None:
        raise BarrierError(f"{what} of {smem}: mbarrier.init was not called for it\n{show(where())}")
    return bar


class mbarrier:
    """Namespace."""

    MBarrierLayout = MBarrierLayout

    @staticmethod
    def init(smem, count):
        if not isinstance(smem, Smem) or smem.numel != 1:
            raise BarrierError(
                f"init needs one barrier (shape [1]), got {getattr(smem, 'shape', smem)}\n{show(where())}"
            )
        task = current()
        bar = Barrier(task.cta, smem, int(count))
        smem.alloc.barriers[int(smem.at.reshape(-1)[0])] = bar
        task.cta.barriers.append(bar)

    @staticmethod
    def invalidate(smem):
        bar = _barrier(smem, "invalidate")
        if bar.tx:
            raise BarrierError(f"invalidate of {bar}, {bar.state()}\n{show(where())}")
        del smem.alloc.barriers[int(smem.at.reshape(-1)[0])]

    @staticmethod
    def expect(smem, bytes, pred=True):
        task = current()
        task.point()
        if isinstance(bytes, Tensor):
            raise BarrierError(
                f"expect() takes a compile-time number of bytes, got a run-time {bytes}\n{show(where())}"
            )
        bar = _barrier(smem, "expect")
        if pred:
            bar.expect(int(bytes), task.clock, (task.label + " (expect)", where(3)))
            task.tick()

    @staticmethod
    def arrive(smem, *, count=1, pred=True):
        task = current()
        task.point()
        bar = _barrier(smem, "arrive")
        if isinstance(count, Tensor):
            raise BarrierError(f"arrive() takes a compile-time count, got a run-time {count}\n{show(where())}")
        if pred:
            bar.arrive(int(count), task.clock, (task.label, where(3)))
            task.tick()

    @staticmethod
    def wait(smem, phase, pred=True, deps=()):
        task = current()
        bar = _barrier(smem, "wait")
        parity = int(phase)
        if parity not in (0, 1):
            raise BarrierError(f"wait for phase {parity} of {bar}: a phase is 0 or 1\n{show(where())}")
        if not pred:
            return
        task.block(
            lambda: bar.passed(parity), lambda: f"{bar}: for the end of a phase of parity {parity}; it is {bar.state()}"
        )
        task.merge(bar.done)


class tma:
    """Namespace."""

    @staticmethod
    def _check(desc, coord, smem, what):
        if not isinstance(desc, Descriptor):
            raise EmuError(f"{what} needs a tensor descriptor, got {desc!r}\n{show(where())}")
        if len(coord) != len(desc.block_shape):
            raise EmuError(
                f"{what}: {len(coord)} coordinates for a descriptor of rank {len(desc.block_shape)}\n{show(where())}"
            )
        if smem.dtype is not desc.dtype:
            raise EmuError(f"{what}: descriptor of {desc.dtype}, shared memory of {smem.dtype}\n{show(where())}")
        squeezed = list(desc.block_shape)
        while len(squeezed) > len(smem.shape) and squeezed[0] == 1:
            squeezed = squeezed[1:]
        if squeezed != smem.shape:
            raise EmuError(
                f"{what}: blocks of {desc.block_shape}, shared memory of shape {smem.shape} ({smem})\n{show(where())}"
            )
        theirs, mine = desc.layout, smem.layout
        if isinstance(theirs, NVMMASharedLayout) and isinstance(mine, NVMMASharedLayout):
            if (theirs.swizzle_byte_width, theirs.element_bitwidth) != (mine.swizzle_byte_width, mine.element_bitwidth):
                raise EmuError(
                    f"{what}: the descriptor's layout {theirs} is not that of {smem}: {mine}\n{show(where())}"
                )
        elif theirs is not None:
            raise EmuError(f"{what}: shared memory needs an NVMMASharedLayout, {smem} has {mine}\n{show(where())}")
        return [int(c) for c in coord]

    @staticmethod
    def async_copy_global_to_shared(desc, coord, barrier, result, pred=True):
        task = current()
        task.point()
        at = tma._check(desc, coord, result, "async_copy_global_to_shared")
        bar = _barrier(barrier, "async_copy_global_to_shared")
        if not pred:
            return
        clock = task.clock.copy()
        task.check_write(result, bar.agent, clock, bar.phase + 1, "TMA load")
        result.alloc.unfenced[result.grains] = 0
        task.tick()
        task.world.flying.append(TmaLoad(task, desc, at, bar, result, clock))

    async_load = async_copy_global_to_shared

    @staticmethod
    def _store(desc, coord, src, how, what):
        task = current()
        task.point()
        at = tma._check(desc, coord, src, what)
        op = TmaStore(task, desc, at, src, how)
        task.check_read(src, task.store_agent, task.clock, op.number, f"TMA {how}", asynchronous=True)
        task.tick()
        task.stores.append(op)

    @staticmethod
    def async_copy_shared_to_global(desc, coord, src):
        tma._store(desc, coord, src, "store", "async_copy_shared_to_global")

    async_store = async_copy_shared_to_global

    @staticmethod
    def store_wait(pendings):
        task = current()
        task.point()
        wait_stores(task, int(pendings))

    @staticmethod
    def make_tensor_descriptor(base, shape, strides, block_shape, layout, padding_option="zero"):
        return make_tensor_descriptor(base, shape, strides, block_shape, layout, padding_option)


def wait_stores(task, pendings, written=False):
    """At most so many of the task's TMA stores still read (or, `written`, write). A Gluon store is a group."""
    while len(task.stores) > pendings:
        op = task.stores.pop(0)
        op.perform()
        task.clock[task.store_agent] = _py.max(task.clock[task.store_agent], op.number)
    if written:
        mine = [op for op in task.world.flying if isinstance(op, GlobalWrite) and op.task is task]
        for op in mine[: len(mine) - pendings]:
            op.perform()


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    task = current()
    task.point()
    if not isinstance(b, Smem):
        raise EmuError(f"warpgroup_mma: b must be in shared memory, got {type(b).__name__}\n{show(where())}")
    if isinstance(a, Accumulator):
        a.refuse()
    if not isinstance(a, (Smem, Tensor)):
        raise EmuError(f"warpgroup_mma: a must be a tensor or shared memory, got {a!r}\n{show(where())}")
    if not isinstance(acc, (Tensor, Accumulator)):
        raise EmuError(f"warpgroup_mma: acc must be a tensor, got {acc!r}\n{show(where())}")
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or list(acc.shape) != [m, n]:
        raise EmuError(f"warpgroup_mma of {a.shape} × {b.shape} into {list(acc.shape)}\n{show(where())}")
    if a.dtype is not b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        raise EmuError(f"warpgroup_mma of {a.dtype} × {b.dtype}\n{show(where())}")
    if m % (16 * task.warps) or task.warps % 4 or n % 8 or k * a.dtype.bits < 256:
        raise EmuError(
            f"warpgroup_mma of {m}×{k}×{n} by {task.warps} warps: M must be a multiple of 16·warps, warps of 4, "
            f"N of 8, K at least {256 // a.dtype.bits}\n{show(where())}"
        )
    instr = getattr(acc.layout, "instr_shape", None)
    if isinstance(acc.layout, NVMMADistributedLayout):
        if instr[1] > n or n % instr[1] or instr[2] * a.dtype.bits != 256:
            raise EmuError(
                f"warpgroup_mma of {a.dtype} {m}×{k}×{n} with instr_shape {instr}: its N must divide {n}, its K be "
                f"{256 // a.dtype.bits}\n{show(where())}"
            )
        if acc.layout.warps_per_cta[0] * acc.layout.warps_per_cta[1] != task.warps:
            raise EmuError(f"warpgroup_mma by {task.warps} warps with {acc.layout}\n{show(where())}")
    else:
        raise EmuError(f"warpgroup_mma: acc has the layout {acc.layout}, not NVMMADistributedLayout\n{show(where())}")
    if isinstance(a, Tensor) and not isinstance(a.layout, DotOperandLayout):
        raise EmuError(f"warpgroup_mma: a in registers needs a DotOperandLayout, has {a.layout}\n{show(where())}")
    if a.dtype.bits == 8 and (b.at[1, 0] - b.at[0, 0] != 1 or (isinstance(a, Smem) and a.at[0, 1] - a.at[0, 0] != 1)):
        raise EmuError(
            "warpgroup_mma of 8-bit numbers: both operands must lie in shared memory with K as the dimension "
            f"whose elements are neighbours (b: a permuted [N, K] tile)\n{show(where())}"
        )
    if use_acc and isinstance(acc, Accumulator) and acc.op.task is not task:
        raise EmuError(f"warpgroup_mma: the accumulator is another partition's\n{show(where())}")
    op = Mma(task, a, b, acc, bool(use_acc), acc.dtype)
    for operand in (a, b):
        if isinstance(operand, Smem):
            task.check_read(operand, task.mma_agent, task.clock, op.number, "wgmma", asynchronous=True)
    task.tick()
    task.mmas.append(op)
    result = Accumulator(op, [m, n], acc.layout)
    if not is_async:
        return warpgroup_mma_wait(0, (result,))
    return result


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    task = current()
    if deps is None:
        raise EmuError(f"warpgroup_mma_wait: deps must be given\n{show(where())}")
    task.point()
    while len(task.mmas) > int(num_outstanding):
        op = task.mmas.pop(0)
        op.perform()
        op.retired = True
        task.clock[task.mma_agent] = op.number
    task.point()
    out = tuple(
        Tensor(d.op.result, d.dtype, d.layout) if isinstance(d, Accumulator) and d.op.retired else d for d in deps
    )
    return out[0] if len(out) == 1 else out


def warpgroup_mma_init(value):
    return value
