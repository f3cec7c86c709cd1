# mypy: ignore-errors
"""`gl`: loads, stores and atomics of global memory; warp_specialize."""

from __future__ import annotations

import numpy as np

from tests.gluon.errors import EmuError, current, show, where
from tests.gluon.scheduler import Task
from tests.gluon.tensors import Pointer, Tensor, _cast, tensor_of


def _mask(mask, shape):
    return None if mask is None else np.broadcast_to(tensor_of(mask).a, shape)


def load(
    pointer,
    mask=None,
    other=None,
    boundary_check=(),
    padding_option="",
    cache_modifier="",
    eviction_policy="",
    volatile=False,
):
    if not isinstance(pointer, Pointer):
        raise EmuError(f"gl.load of {pointer!r}: it takes a pointer\n{show(where())}")
    current().point()
    at = np.asarray(pointer.at)
    m = _mask(mask, at.shape)
    pointer.check(at, m, "load")
    if m is None:
        return Tensor(pointer.mem.take(at), pointer.dtype.element_ty, pointer.layout)
    out = np.zeros(at.shape, pointer.mem.dtype)
    if other is not None:
        out[...] = _cast(tensor_of(other).a, pointer.dtype.element_ty)
    out[m] = pointer.mem[at[m]]
    return Tensor(out if out.ndim else out[()], pointer.dtype.element_ty, pointer.layout)


def store(pointer, value, mask=None, boundary_check=(), cache_modifier="", eviction_policy=""):
    if not isinstance(pointer, Pointer):
        raise EmuError(f"gl.store to {pointer!r}: it takes a pointer\n{show(where())}")
    current().point()
    at = np.asarray(pointer.at)
    value = _cast(np.asarray(tensor_of(value).a), pointer.dtype.element_ty)
    if np.ndim(value) > at.ndim:
        raise EmuError(f"gl.store of a tensor {np.shape(value)} to pointers {at.shape}\n{show(where())}")
    value, m = np.broadcast_to(value, at.shape), _mask(mask, at.shape)
    pointer.check(at, m, "store")
    if m is None:
        pointer.mem[at] = value
    else:
        pointer.mem[at[m]] = value[m]


def _atomic(name, fn):
    def run(pointer, val, mask=None, sem=None, scope=None):
        current().point()
        at = np.asarray(pointer.at)
        m = _mask(mask, at.shape)
        pointer.check(at, m, name)
        value = np.broadcast_to(_cast(np.asarray(tensor_of(val).a), pointer.dtype.element_ty), at.shape)
        old = np.zeros(at.shape, pointer.mem.dtype)
        flat, places, new = old.reshape(-1), at.reshape(-1), value.reshape(-1)
        keep = np.ones(at.size, bool) if m is None else m.reshape(-1)
        for i in np.flatnonzero(keep):
            flat[i] = pointer.mem[places[i]]
            pointer.mem[places[i]] = fn(flat[i], new[i])
        return Tensor(old if old.ndim else old[()], pointer.dtype.element_ty, pointer.layout)

    return run


atomic_add = _atomic("atomic_add", lambda a, b: a + b)
atomic_max = _atomic("atomic_max", lambda a, b: np.maximum(a, b))
atomic_min = _atomic("atomic_min", lambda a, b: np.minimum(a, b))
atomic_and = _atomic("atomic_and", lambda a, b: a & b)
atomic_or = _atomic("atomic_or", lambda a, b: a | b)
atomic_xor = _atomic("atomic_xor", lambda a, b: a ^ b)
atomic_xchg = _atomic("atomic_xchg", lambda a, b: b)


def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    current().point()
    at = int(np.asarray(pointer.at))
    pointer.check(np.asarray(at), None, "atomic_cas")
    old = pointer.mem[at]
    if old == tensor_of(cmp).a:
        pointer.mem[at] = tensor_of(val).a
    return Tensor(old, pointer.dtype.element_ty)


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs):
    main = current()
    world, cta = main.world, main.cta
    (default, default_args), *workers = functions_and_args
    if len(workers) != len(worker_num_warps) or len(workers) != len(worker_num_regs):
        raise EmuError(
            f"warp_specialize: {len(workers)} workers, {len(worker_num_warps)} warp counts, "
            f"{len(worker_num_regs)} register counts\n{show(where())}"
        )
    for regs in worker_num_regs:
        if not 24 <= regs <= 256:
            raise EmuError(f"warp_specialize: {regs} registers: 24 to 256\n{show(where())}")
    started = []
    for i, ((fn, args), warps) in enumerate(zip(workers, worker_num_warps, strict=False)):
        if not isinstance(args, (tuple, list)):
            raise EmuError(f"warp_specialize: the arguments must be a tuple, got {args!r}\n{show(where())}")
        name = getattr(fn, "__name__", "worker")
        task = Task(cta, f"partition {i + 1} ({name})", i + 1, fn, tuple(args), main.clock, warps)
        started.append(task)
        world.add(task)
    main.tick()
    main_name, main.name = main.name, f"partition 0 ({getattr(default, '__name__', 'default')})"
    result = default(*default_args)
    main.block(
        lambda: all(t.done for t in started),
        lambda: "the other partitions to end: " + ", ".join(t.name for t in started if not t.done),
    )
    for task in started:
        main.merge(task.clock)
    main.name = main_name
    return result
