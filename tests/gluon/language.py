# mypy: ignore-errors
"""`gl`: compile-time values, shared memory, program numbers, and the shapes of tensors."""

from __future__ import annotations

import builtins as _py
import functools
import math

import numpy as np

from tests.gluon.dtypes import int32
from tests.gluon.errors import EmuError, _active, current, show, where
from tests.gluon.layouts import MBarrierLayout, SliceLayout, _offsets
from tests.gluon.shared import Allocation, Smem
from tests.gluon.tensors import Tensor, _cast, _operands, _shape, tensor_of


class constexpr:
    """`gl.constexpr(x)` is x."""

    def __new__(cls, value):
        return value


def constexpr_function(fn):
    """Runs as plain Python, also inside a kernel."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        _active.plain += 1
        try:
            return fn(*args, **kwargs)
        finally:
            _active.plain -= 1

    return call


def allocate_shared_memory(element_ty, shape, layout, value=None):
    task, shape = current(), _shape(shape)
    at = _offsets(shape, layout, element_ty)
    nbytes = (int(at.max()) + 1) * element_ty.itemsize
    alloc = Allocation(task.cta, nbytes, element_ty, shape)
    task.cta.allocations.append(alloc)
    task.cta.smem += nbytes
    smem = Smem(alloc, element_ty, at, layout)
    if isinstance(layout, MBarrierLayout):
        alloc.write_id[:] = 0
    if value is not None:
        smem.store(value)
    return smem


def program_id(axis=0):
    return Tensor(np.int32(current().cta.ids[int(axis)]), int32)


def num_programs(axis=0):
    return Tensor(np.int32(current().world.grid[int(axis)]), int32)


def num_warps():
    return current().warps


def num_ctas():
    return 1


def thread_barrier():
    current().point()


debug_barrier = barrier = thread_barrier


def static_range(*args):
    for a in args:
        if isinstance(a, Tensor):
            raise EmuError(f"static_range takes compile-time numbers, got a run-time {a}\n{show(where())}")
    return _py.range(*args)


def kernel_range(*args, **_):
    """`range` in kernel files: inside a kernel its numbers are run-time scalars."""
    numbers = _py.range(*(int(a) for a in args))
    if _active.task is None or _active.plain:
        return numbers
    return (Tensor(np.int32(i), int32) for i in numbers)


def static_assert(cond, msg=""):
    if isinstance(cond, Tensor):
        raise EmuError(f"static_assert of a run-time value\n{show(where())}")
    if not cond:
        raise EmuError(f"static_assert failed: {msg}\n{show(where())}")


def static_print(*args, **_):
    pass


def device_print(prefix, *args, **_):
    print(current().label, prefix, *args)


def device_assert(cond, msg="", mask=None):
    a = tensor_of(cond).a
    if mask is not None:
        a = a | ~tensor_of(mask).a
    if not np.all(a):
        raise EmuError(f"device_assert failed: {msg}\n{show(where())}")


def assume(cond):
    if not np.all(tensor_of(cond).a):
        raise EmuError(f"gl.assume of what does not hold\n{show(where())}")


def multiple_of(x, values):
    return x


max_contiguous = max_constancy = multiple_of


def arange(start, end, layout=None):
    (start, end) = _shape([start, end])
    if (end - start) & (end - start - 1) or end <= start:
        raise EmuError(f"arange({start}, {end}): its length must be a power of two\n{show(where())}")
    return Tensor(np.arange(start, end, dtype=np.int32), int32, layout)


def full(shape, value, dtype, layout=None):
    a = tensor_of(value)
    return Tensor(np.full(_shape(shape), _cast(a.a, dtype)), dtype, layout)


def zeros(shape, dtype, layout=None):
    return Tensor(np.zeros(_shape(shape), dtype.np), dtype, layout)


def full_like(x, value, shape=None, dtype=None, layout=None):
    return full(x.shape if shape is None else shape, value, dtype or x.dtype, layout or x.layout)


def zeros_like(x, shape=None, dtype=None, layout=None):
    return full_like(x, 0, shape, dtype, layout)


def convert_layout(value, layout, assert_trivial=False):
    value = tensor_of(value)
    return Tensor(value.a, value.dtype, layout)


set_auto_layout = convert_layout


def reshape(x, *shape, can_reorder=False):
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    x, shape = tensor_of(x), _shape(shape)
    if math.prod(shape) != x.numel:
        raise EmuError(f"reshape of {x.shape} to {shape}\n{show(where())}")
    return Tensor(x.a.reshape(shape), x.dtype, x.layout)


view = reshape


def permute(x, *order):
    order = order[0] if len(order) == 1 and isinstance(order[0], (list, tuple)) else order
    if isinstance(x, Smem):
        return x.permute(order)
    x = tensor_of(x)
    order = _shape(order) if order else list(range(len(x.shape)))[::-1]
    return Tensor(np.ascontiguousarray(x.a.transpose(order)), x.dtype, x.layout)


trans = permute


def join(x, y):
    a, b, dtype, layout = _operands(x, y)
    return Tensor(np.stack(np.broadcast_arrays(a, b), -1), dtype, layout)


def split(x):
    x = tensor_of(x)
    if x.shape[-1] != 2:
        raise EmuError(f"split of {x.shape}: the last dimension must be 2\n{show(where())}")
    return tuple(Tensor(np.ascontiguousarray(x.a[..., i]), x.dtype, x.layout) for i in (0, 1))


def expand_dims(x, axis):
    x = tensor_of(x)
    a = np.asarray(x.a)
    for one in sorted(_shape(axis)):
        a = np.expand_dims(a, one)
    layout = x.layout.parent if isinstance(x.layout, SliceLayout) else x.layout
    return Tensor(a, x.dtype, layout)


def broadcast(x, y):
    shape = np.broadcast_shapes(x.a.shape, y.a.shape)
    return broadcast_to(x, shape), broadcast_to(y, shape)


def broadcast_to(x, *shape):
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    return Tensor(np.broadcast_to(x.a, _shape(shape)), x.dtype, x.layout)


def ravel(x):
    return reshape(x, [x.numel])


def cast(x, dtype, fp_downcast_rounding=None, bitcast=False):
    return tensor_of(x).to(dtype, bitcast=bitcast)


def to_tensor(x):
    return tensor_of(x)


def _tensor_reshape(self, *shape, **_):
    return reshape(self, *shape)


def _tensor_permute(self, *order):
    return permute(self, *order)


def _tensor_broadcast_to(self, *shape):
    return broadcast_to(self, *shape)


Tensor.reshape = Tensor.view = _tensor_reshape
Tensor.permute = Tensor.trans = _tensor_permute
Tensor.split = split
Tensor.expand_dims = expand_dims
Tensor.broadcast_to = _tensor_broadcast_to
